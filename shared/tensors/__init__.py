"""Parameter trees: arithmetic, files, the SGD step, quantization, pruning and feature dropout."""
