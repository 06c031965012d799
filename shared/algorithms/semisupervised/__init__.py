"""Semi-supervised learning: labels on the server, unlabelled examples on the devices."""
