"""Input pipeline, optimisers, loop, devices, Horovod, checkpoints, metrics."""
