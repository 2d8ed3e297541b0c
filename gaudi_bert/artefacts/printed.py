"""Lines for people that the results of several stages share; each result prints itself by its `lines`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gaudi_bert.common.errors import enumerated
from gaudi_bert.common.progress import count_of


def skipped_note(skipped: bool) -> str:
    """Return ` (already there, nothing to do)` where a stage had nothing to do."""
    return " (already there, nothing to do)" if skipped else ""


def packing_lines(packed: Any, rows: int | None = None) -> list[str]:
    """Return the lines of packs: of how many sequences (or `rows` of a table), and how full they are.

    `packed` are the totals of a plan, or the metadata of a folder.
    """
    proven = f"{packed.gap:,} more than the proven minimum" if packed.gap else "proven: none fewer is possible"
    sequences = count_of(packed.sequences, "sequence")
    if rows is not None and rows != packed.sequences:
        sequences = f"{count_of(rows, 'row')} ({sequences})"
    return [
        f"{sequences} became {count_of(packed.packs, 'pack')} ({packed.packing_factor:.2f} times fewer), {proven}",
        f"{100 * packed.efficiency:.2f} % of the slots hold tokens",
    ]


def algorithm_line(algorithm: str, used: Sequence[str], depth: int | None) -> str:
    """Return which algorithms packed; `used` are those that `algorithm` chose."""
    others = [name for name in used if name != algorithm]
    heuristics = f" (by {enumerated(others)})" if others else ""
    return f"algorithm {algorithm}{heuristics}, depth {depth}"
