"""Code that every other package of gaudi_bert may use: errors, atomic files, launchers, progress, threads, seeded
permutations, sampling, compiled kernels and CRC-32C.
"""
