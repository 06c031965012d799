"""Chaos tests: a local site whose processes are killed at random moments."""
