"""What a task, a link and a board cost: cycles, joules, seconds and rates."""
