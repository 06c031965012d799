"""What each command of `device-agent` does; heavy imports wait until a command needs them."""
