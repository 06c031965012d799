"""Model export and immutable releases: creation, storage, rollout and serving."""
