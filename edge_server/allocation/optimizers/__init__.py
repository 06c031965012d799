"""Solvers of the allocation problems: pure `solve(problem)` functions in SI units."""
