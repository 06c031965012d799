"""Evaluation on devices, BatchNorm running statistics, and the figures of a round."""
