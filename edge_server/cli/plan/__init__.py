"""The reference of a plan's keys: as a table, as a page, as a JSON Schema."""
