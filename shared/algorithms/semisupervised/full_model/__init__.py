"""Semi-supervised methods whose devices train the whole network, which the split one is compared with."""
