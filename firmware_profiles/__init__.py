"""One TOML a board: where its readings and its settings are. Data only, read through `importlib.resources`."""
