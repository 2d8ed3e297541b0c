"""The order in which packs are read, for any number of processes, and the reading of shards in this order."""
