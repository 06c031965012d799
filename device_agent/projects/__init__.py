"""Projects on a board: fetch, verify and install code for the trainer."""
