"""What a model is, whatever computes it: sizes, variables and their names and first values, heads, features. No framework."""
