"""Weak and strong views of examples, for consistency-based (semi-supervised) learning."""
