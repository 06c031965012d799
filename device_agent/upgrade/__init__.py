"""Agent upgrades with trial and rollback: the root updater and the agent's health signals."""
