"""The steps of a split round: features in, a barrier, gradients out."""
