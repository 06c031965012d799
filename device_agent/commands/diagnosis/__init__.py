"""Checks of a board, and its state as text or as a recorded folder."""
