"""On-device inference: release store, gates, hot swap and the serving process."""
