"""Exchange with the server: tasks down, updates and features up, reports."""
