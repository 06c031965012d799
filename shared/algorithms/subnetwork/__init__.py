"""Methods that give each device some of the network's neurons."""
