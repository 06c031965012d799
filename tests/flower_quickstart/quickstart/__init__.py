"""Flower's PyTorch quickstart with scikit-learn's digits."""
