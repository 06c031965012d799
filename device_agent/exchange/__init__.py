"""What travels between a device and its server: tasks down, updates and features up, reports."""
