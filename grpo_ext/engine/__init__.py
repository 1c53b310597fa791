"""What runs the mathematics on hardware: loading, sampling, the window. The only place that calls collectives."""
