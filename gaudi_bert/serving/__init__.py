"""Packed requests over HTTP: what waits is packed into one of a few static shapes, whatever its lengths."""
