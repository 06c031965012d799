"""Power sources: sensors by rail, energy counters, a network meter, and a model."""
