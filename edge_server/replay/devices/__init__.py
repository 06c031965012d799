"""A replayed device's seconds, rates and watts: from a plan, a recorded series, or a recorded run."""
