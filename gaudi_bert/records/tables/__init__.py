"""Tables of other tools (Parquet, Arrow, Hugging Face datasets), in and out. pyarrow is imported only here."""
