"""Exchange with the server: receive tasks; send updates, features and reports."""
