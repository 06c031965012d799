"""The devices of a site and what they measured last, for people and for programs."""
