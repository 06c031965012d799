"""Trials: live runs of a plan, on a site or on this machine."""
