"""Journals of rollouts, and the state they describe."""
