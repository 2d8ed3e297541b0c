"""Data of other tools: Hugging Face datasets, Parquet and Arrow tables, and the predecessor's packed
folders."""
