"""Parameter trees: arithmetic, files, the SGD step, quantization, pruning and dropout of features."""
