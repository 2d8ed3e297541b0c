"""Packing by rules of thumb on the histogram: fast, without a proof."""
