"""From groups in memory to packed shards."""
