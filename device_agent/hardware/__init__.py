"""Hardware access: files, hwmon chips, command-line tools, plausibility bounds, smoke tests."""
