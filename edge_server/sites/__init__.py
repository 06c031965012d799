"""Several sites of one run: their graph, how models are mixed, and what their servers say to each other."""
