"""Trainer process: loads PyTorch and performs one task at a time."""
