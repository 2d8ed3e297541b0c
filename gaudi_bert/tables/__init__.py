"""Rows of Parquet, Arrow and JSON lines: groups, packs, proof, tokenizing."""
