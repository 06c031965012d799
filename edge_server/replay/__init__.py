"""Replay of runs in virtual time, with the real server and agents.

This is the only package that imports both `edge_server` and `device_agent`.
"""
