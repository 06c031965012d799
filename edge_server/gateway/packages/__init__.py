"""Agent packages: store, sign and serve them to boards."""
