"""Weak and strong views of examples, for methods that learn from how both are answered."""
