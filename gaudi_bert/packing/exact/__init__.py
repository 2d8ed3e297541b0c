"""Optimal packing: the linear program with column generation, the search for integer packs, and certified lower bounds."""
