"""A grid of plans, each replayed in a process of its own, and one summary of what they came to."""
