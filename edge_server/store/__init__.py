"""Where a run is remembered."""
