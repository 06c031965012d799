"""Commands of `device-agent`; heavy imports are deferred until a command needs them."""
