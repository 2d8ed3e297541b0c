"""What packing will give, before anything is packed."""
