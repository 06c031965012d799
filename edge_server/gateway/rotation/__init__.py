"""New keys for a gateway, a next site CA and a next root, while boards stay connected."""
