"""Resource allocation: model size, bandwidth and time per device and round."""
