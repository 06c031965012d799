"""Commands of `edge-server`; heavy imports are deferred until a command needs them."""
