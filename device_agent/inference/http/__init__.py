"""The Open Inference Protocol, version 2, over HTTP/1.1 for applications on the same board."""
