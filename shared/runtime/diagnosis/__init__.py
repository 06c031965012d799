"""Support bundles of agent and server, with secrets and identities redacted."""
