"""`edge-server plan`: check plans; print the reference and JSON Schema of their keys."""
