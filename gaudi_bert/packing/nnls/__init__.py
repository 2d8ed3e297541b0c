"""Packing by non-negative least squares over strategies: the published methods and their solver."""
