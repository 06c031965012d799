"""What a coordinator decides from, and how each of its optimizers is asked."""
