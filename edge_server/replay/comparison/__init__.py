"""Comparison of a replay with its recorded run, as text and HTML."""
