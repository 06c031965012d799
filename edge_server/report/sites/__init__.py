"""Runs of several sites of one plan, put together."""
