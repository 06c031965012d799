"""Firmware profiles: known properties of a board and its power modes."""
