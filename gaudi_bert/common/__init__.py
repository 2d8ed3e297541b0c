"""Code that every other folder may use: errors, atomic files, seeded permutations, sampling, progress, compiled kernels,
CRC-32C.
"""
