"""What every room may use: errors, files that are never half-written, seeded permutations, progress."""
