"""Wire protocol: messages, their encoding, MQTT topics, payload bytes."""
