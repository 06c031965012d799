"""How boards join a site and renew their certificates: one-time tokens, and the HTTPS service that they ask."""
