"""Split learning: devices train the layers below a cut, the server those above it."""
