"""New versions of the agent beside the running one: root's half, which alone installs code, and the agent's proof."""
