"""A run, whatever computes it: input, the loop, schedule, checkpoints, metrics, evaluation. No framework."""
