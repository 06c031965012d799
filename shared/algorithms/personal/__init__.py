"""Methods that keep a part of the network on its device."""
