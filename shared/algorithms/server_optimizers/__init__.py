"""Server optimizers: momentum and adaptive steps along the devices' mean change."""
