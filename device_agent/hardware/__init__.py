"""A board's files, chips and command-line tools, recorded folders, bounds of figures, and whether its libraries run."""
