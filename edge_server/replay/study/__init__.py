"""Study: a grid of plans, each replayed in its own process, and a summary."""
