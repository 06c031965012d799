"""Readers of data sets' files, one a file, by numpy alone: a board without torch evaluates on its own examples."""
