"""Clocks and power modes of a board: read, plan, apply and restore."""
