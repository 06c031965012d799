"""The trial plan: typed sections of one TOML file."""
