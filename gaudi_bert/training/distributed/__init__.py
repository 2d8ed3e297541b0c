"""Several processes that train one model: sums over all, and one end for all."""
