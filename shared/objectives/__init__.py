"""Objectives: losses, metrics that add over devices, and the record that trains and evaluates by them."""
