"""Clocks, executors, tasks and files of a process: what every process of ours needs of its operating system."""
