"""What runs on the gateway: rounds, aggregation, the coordinator, the record."""
