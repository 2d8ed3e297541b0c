"""Code that every other folder may use: errors, atomic files, launchers, progress, threads, seeded permutations, sampling,
compiled kernels and CRC-32C.
"""
