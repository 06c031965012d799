"""Hardware access of a board: files, hwmon chips, command-line tools, plausibility bounds, smoke tests."""
