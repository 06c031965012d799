"""Split learning: layers below a cut on devices, the others on the server."""
