"""Allocators, one per file: options, limits, figures and decision."""
