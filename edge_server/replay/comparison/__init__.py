"""How far a replay is from a recorded run: the gap, as lines, a table and a page."""
