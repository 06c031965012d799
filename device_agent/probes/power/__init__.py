"""Sources of a board's watts, one a file, and the total that they make."""
