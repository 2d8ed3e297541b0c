"""Tables in Parquet, Arrow and JSON lines: reading them in groups, tokenizing, packing, and verifying the packs."""
