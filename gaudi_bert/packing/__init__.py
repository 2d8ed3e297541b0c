"""Pack histograms of sequence lengths: heuristics, solvers, lower bounds with proofs, and estimates of what packing would
save.

Everything here works on counts per length and returns strategy counts or packings in memory. Nothing in this package reads
or writes files or imports a framework.
"""
