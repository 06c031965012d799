"""Objectives of runs: losses, and metrics that add over devices."""
