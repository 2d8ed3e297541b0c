"""Names that stand for data in the place of a file: the documentation that every CPython carries."""

from __future__ import annotations

__all__ = ["BUILT_IN_ROWS", "BUILT_IN_TEXTS"]

# By name, about how many bytes the text has (it differs a little from one Python to the next).
BUILT_IN_TEXTS = {"python-docs": 470_000, "python-docstrings": 1_400_000}

# Labelled rows: docstrings, and the package of the standard library that each is from.
BUILT_IN_ROWS = ("python-docstrings",)
