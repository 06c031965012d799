"""What a release must pass on a board before it may answer, tried in a process of its own."""
