"""Collaborative inference: the lower half of a network here, the upper half on the server."""
