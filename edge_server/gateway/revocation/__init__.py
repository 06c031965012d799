"""Revocation of devices: at the broker, and in a running server."""
