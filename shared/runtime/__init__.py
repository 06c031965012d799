"""Operating-system services for processes: clocks, executors, files, locks, logs, memory."""
