"""What `gaudi-bert compare` prints for people: one table, the fewest packs first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["describe_comparison"]

MADE_BY = {"gaudi-bert": "", "package": "the installed package", "stand-in": "stand-in"}


def describe_comparison(result: Mapping[str, Any]) -> list[str]:
    """The lines: what was packed, a row for each packer, and what the last column means."""
    depth = "any number of sequences" if result["depth"] is None else f"at most {result['depth']:,} sequences"
    lines = [
        f"{result['source']}: {result['sequences']:,} sequences, {result['tokens']:,} tokens, {result['order']}",
        f"Packs of {result['max_sequence_length']:,} slots and {depth}; any packing needs {result['lower_bound']:,}.",
        "",
        f"  {'packer':<27}{'packs':>13}{'efficiency':>12}{'above the bound':>26}{'seconds':>10}",
    ]
    for row in result["rows"]:
        above = f"{row['gap']:,}" + (f" ({100 * row['gap_share']:.3g} %)" if row["gap"] else "")
        name = f"{row['tool']} {row['algorithm']}"
        lines.append(
            f"  {name:<27}{row['packs']:>13,}{100 * row['efficiency']:>10.3f} %{above:>26}{row['seconds']:>10.3f}"
            f"  {MADE_BY[row['made_by']]}".rstrip()
        )
    if any(row["made_by"] == "stand-in" for row in result["rows"]):
        lines += ["", "stand-in: the same heuristic with that tool's default settings, written anew and compiled here."]
    return lines
