"""Where a replayed device's figures come from, one kind a file."""
