"""Rotation of a gateway's keys, the site CA and the root, while boards stay connected."""
