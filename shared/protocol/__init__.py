"""The messages of a site, their encoding, their topics, and the bytes of a payload."""
