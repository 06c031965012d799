"""What both sides tell of themselves to whoever helps."""
