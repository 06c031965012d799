"""Commands of `device-agent`; heavy imports wait until a command needs them."""
