"""A run's rounds: assign, broadcast, collect, aggregate, evaluate, record."""
