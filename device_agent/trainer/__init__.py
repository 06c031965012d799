"""The trainer: a process beside the agent that loads PyTorch, and does one task at a time."""
