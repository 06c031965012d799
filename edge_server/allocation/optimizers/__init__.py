"""Optimizers of the coordinator: `solve(problem) -> allocation`, pure, in SI units, one problem a file."""
