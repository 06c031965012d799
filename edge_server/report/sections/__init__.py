"""Sections of the report page that have charts."""
