"""Proof that packed shards hold what the records held: fingerprints and the contract of a packed record."""
