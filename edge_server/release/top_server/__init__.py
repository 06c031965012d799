"""The server's part of collaborative inference: the upper half of a release, run on features that devices send."""
