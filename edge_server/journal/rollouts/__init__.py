"""Journals of rollouts, and what their records come to."""
