"""Commands for releases of trained models: create, list, export, serve, roll out."""
