"""Tables of other tools (Parquet, Arrow, JSON lines, Hugging Face datasets), in and out. pyarrow is imported only here."""
