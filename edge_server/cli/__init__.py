"""The commands of `edge-server`, one a file; heavy imports wait until a command needs them."""
