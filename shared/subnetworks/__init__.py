"""Training some neurons of a network: frozen networks, and networks that are really smaller."""
