"""Agent life cycle, and construction of the agent from its configuration."""
