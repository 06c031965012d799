"""Resource allocation: how much model, bandwidth and time each device of a round gets, and why."""
