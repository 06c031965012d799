"""Projects of users: working folders, wheels and signed manifests."""
