"""Portable trace of a run: a JSON header and CSV tables.

A trace is exported from a run's journal and can be imported as one.
"""
