"""The pipeline of packing for any format: plan, write, verify; all of it, or part K of N."""
