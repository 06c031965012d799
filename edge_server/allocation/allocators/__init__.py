"""Allocators of a coordinator, one a file: options, limits and figures of a round, and the decision made from these."""
