"""Readers of data set files, one module per format, with numpy but without torch."""
