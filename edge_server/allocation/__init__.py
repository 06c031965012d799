"""The coordinator: how much model, bandwidth and time each device gets, and why."""
