"""Server optimizers: a server step along the devices' mean change that has momentum or adapts to each parameter."""
