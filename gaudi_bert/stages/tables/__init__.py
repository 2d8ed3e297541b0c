"""Tables of token columns: packed, verified, and turned into records."""
