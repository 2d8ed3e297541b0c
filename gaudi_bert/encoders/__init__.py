"""How any encoder of `transformers` has to be fed packs, tried on the model: feeding, trials, heads, weights, pooling."""
