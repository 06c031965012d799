"""When models are evaluated and by whom, what their running statistics are, and what a round came to."""
