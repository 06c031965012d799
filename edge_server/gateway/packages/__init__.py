"""Packages of the agent, and what its setup takes, as a gateway keeps, signs and serves them to its boards."""
