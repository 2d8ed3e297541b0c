"""How packs are read: one order for any number of processes, and the shards of a stream."""
