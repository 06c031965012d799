"""Measurement of tasks, links and boards: cycles, energy, time and rates."""
