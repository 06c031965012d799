"""Behaviour of replayed devices: time, transfer rates and power by source."""
