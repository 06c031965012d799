"""A trial: its plan, its run, its record."""
