"""The agent's life cycle, and its composition from the configuration."""
