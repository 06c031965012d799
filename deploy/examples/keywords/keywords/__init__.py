"""Recognition of spoken keywords."""
