"""Record of a run: rows built once from its journal."""
