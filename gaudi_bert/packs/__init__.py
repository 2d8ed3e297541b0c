"""The stages of packing for any file format: write and verify, each for all of the data or for part K of N."""
