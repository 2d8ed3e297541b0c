"""The arithmetic: histogram, strategies, solvers, bounds, plan, metrics. No I/O, no TensorFlow, no pictures."""
