"""Acceptance gates: tests of a release, run in a separate process."""
