"""Semi-supervised baselines whose devices train the whole network."""
