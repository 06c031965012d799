"""Stand-in for torchvision, whose wheels do not fit every build of torch: the transforms that Flower's apps use."""
