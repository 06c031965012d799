"""A release on its way to the boards of a site, a wave of them at a time."""
