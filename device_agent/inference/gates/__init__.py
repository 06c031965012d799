"""Acceptance gates: tests of a release on the board, run in a separate process."""
