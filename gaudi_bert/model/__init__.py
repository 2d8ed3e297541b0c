"""What a model is, whatever computes it: sizes, names and first values of variables, heads, features. No framework."""
