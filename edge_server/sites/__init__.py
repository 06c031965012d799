"""Several sites in one run: graph, gossip, mixing and joint decisions."""
