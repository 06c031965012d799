"""Clocks and power modes of a board: read, planned, set, and restored."""
