"""Semi-supervised learning: labels at the server alone, examples without labels on the devices."""
