"""Diagnosis of a board: checks with fixes, recordings, tables of readings."""
