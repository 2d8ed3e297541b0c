"""Figures as people read them."""

from __future__ import annotations

__all__ = ["percent"]

_MOST_DECIMALS = 9


def percent(share: float, decimals: int = 1) -> str:
    """A share as a percentage: 0.9949 as 99.5 %.

    More decimals are given where fewer would round it to 0 or to 100 although it is neither. The space is one that does not
    break lines.
    """
    while 0 < share < 1 and decimals < _MOST_DECIMALS and round(100 * share, decimals) in (0, 100):
        decimals += 1
    return f"{100 * share:.{decimals}f}\u00a0%"
