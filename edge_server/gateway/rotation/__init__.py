"""Online rotation of a gateway's keys, site CA and root."""
