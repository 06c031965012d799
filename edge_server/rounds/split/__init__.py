"""Split rounds: features in, step barrier, gradients out."""
