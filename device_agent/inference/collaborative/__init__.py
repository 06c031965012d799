"""Collaborative inference: lower half on the device, upper half on the server."""
