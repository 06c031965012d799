"""The agent itself, and how it is composed from its configuration."""
