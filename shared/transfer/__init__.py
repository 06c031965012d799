"""Payloads in frames: sending them, receiving them, and asking again for what is missing."""
