"""Rows of text: read from files, turned into token ids, packed; answers in the order of the rows."""
