"""Reports of runs from their journals: HTML page, CSV and JSON."""
