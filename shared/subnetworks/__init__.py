"""Partial training of a network: frozen networks, and physically smaller networks."""
