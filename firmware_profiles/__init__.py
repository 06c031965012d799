"""Firmware profiles: one TOML file per board, read through `importlib.resources`."""
