"""Commands about releases of trained models: made, listed, exported, served, rolled out."""
