"""What `gaudi-bert estimate` prints for people: two small tables and a conclusion; with `--details` all that was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gaudi_bert.common.progress import human_bytes, human_seconds

__all__ = ["describe_details", "describe_estimate", "describe_task_estimate"]

_LABEL_WIDTH = 26


def describe_estimate(result: Mapping[str, Any]) -> list[str]:
    """The lines for a first look: efficiency and distance from the proven bound over depth, and the best packing."""
    rows = [row for row in result["rows"] if row["gap"] is not None]
    depths = sorted({row["depth"] for row in rows}, key=lambda depth: (depth == "max", depth))
    lines = [*_headline(result), ""]
    if rows:
        lines += [
            "Share of slots that hold tokens, by the most sequences that a pack may hold:",
            _cells("", [f"{depth:,}" if depth != "max" else "max" for depth in depths]),
            *_table(rows, depths, lambda row: f"{100 * row['efficiency']:.2f} %"),
            "",
            "Packs above the number that is proven necessary:",
            *_table(rows, depths, lambda row: f"{row['gap']:,}"),
            _cells("proven necessary", [f"{_bound(rows, depth):,}" for depth in depths]),
            "",
            _conclusion(result, rows),
        ]
    lines += [
        f"{row['algorithm']}: padded to the longest of a batch, {100 * row['efficiency']:.2f} % of the slots hold tokens"
        for row in result["rows"]
        if row["gap"] is None
    ]
    return lines


def describe_details(result: Mapping[str, Any]) -> list[str]:
    """Every row with its time and memory, packs of other lengths, and packing against un-padding."""
    lines = [*_headline(result), "", *_all_rows(result)]
    lines += ["", "packs of another length (LPFHP; slots and attention relative to one sequence per row):"]
    lines += [
        f"  {row['max_sequence_length']:>6}: {row['packs']:>12,} packs, efficiency {100 * row['efficiency']:.2f} %,"
        f" {row['fewer_slots']:.3f} x fewer slots, attention x {row['attention_cost']:.3f}"
        for row in result["length_scan"]
    ]
    lines += [
        "",
        "speed-up over the number of accelerators: un-padding (paper E) / ideal un-padding of these data / packing:",
    ]
    lines += [
        f"  {row['accelerators']:>6}: {row['unpadding']:.3f} / {row['ideal_unpadding']:.3f} / {row['packing']:.3f}"
        for row in result["unpadding"]["rows"]
    ]
    return lines


def describe_task_estimate(result: Mapping[str, Any]) -> list[str]:
    """Packs, and sequences in each, by the length of a row and by depth."""
    rows = result["rows"]
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    lines = [
        f"{result['source']}: {result['sequences']:,} sequences ({result['task']}), {result['mean_length']:.2f} tokens on"
        f" average, the longest {result['longest']:,}",
        "",
        "Packs (sequences in each), by tokens of a row and the most sequences that a pack may hold:",
        f"  {'row':>6} {'cut':>8}" + "".join(f"{depth:>20}" for depth in depths),
    ]
    for length in dict.fromkeys(row["max_sequence_length"] for row in rows):
        own = [row for row in rows if row["max_sequence_length"] == length]
        cells = [f"{row['packs']:,} ({row['packing_factor']:.3f})" for row in own]
        lines.append(f"  {length:>6} {own[0]['cut']:>8,}" + "".join(f"{cell:>20}" for cell in cells))
    above = [row for row in rows if row["gap"]]
    lines += [
        "",
        "No packing needs fewer: each is proven optimal." if not above else "Not proven to be the fewest possible:",
    ]
    lines += [
        f"  rows of {row['max_sequence_length']}, depth {row['depth']}: proven necessary are {row['lower_bound']:,}"
        for row in above
    ]
    return lines


def _headline(result: Mapping[str, Any]) -> list[str]:
    share, least = result["tokens"] / (result["sequences"] * result["max_sequence_length"]), result["token_bound"]
    return [
        f"{result['source']}: {result['sequences']:,} sequences of up to {result['max_sequence_length']:,} tokens",
        f"One per row, {100 * share:.2f} % of the slots hold tokens; the tokens alone need {least:,} packs.",
    ]


def _cells(label: str, cells: list[str]) -> str:
    width = max(11, *(len(cell) + 2 for cell in cells))
    return f"  {label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>{width}}" for cell in cells)


def _table(rows: list[Any], depths: list[Any], cell: Callable[[Any], str]) -> list[str]:
    """One line per algorithm, one column per depth."""
    lines = []
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        own = {row["depth"]: cell(row) for row in rows if row["algorithm"] == algorithm}
        lines.append(_cells(algorithm, [own.get(depth, "") for depth in depths]).rstrip())
    return lines


def _bound(rows: list[Any], depth: Any) -> int:
    return max(row["lower_bound"] for row in rows if row["depth"] == depth)


def _conclusion(result: Mapping[str, Any], rows: list[Any]) -> str:
    """The fewest packs found, at the least depth that gives them."""
    best = min(rows, key=lambda row: (row["packs"], row["depth"] == "max", row["depth"]))
    depth = "unlimited depth" if best["depth"] == "max" else f"depth {best['depth']}"
    proven = "and no packing needs fewer" if best["gap"] == 0 else f"proven necessary are {best['lower_bound']:,}"
    return (
        f"{best['packs']:,} packs of {depth} ({best['algorithm']}) take the place of {result['sequences']:,} rows,"
        f" {best['packing_factor']:.3f} times fewer, {proven}."
    )


def _all_rows(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{'algorithm':<10} {'depth':>5} {'packs':>13} {'above bound':>12} {'efficiency':>11} {'factor':>7}"
        f" {'strategies':>10} {'time':>9} {'memory':>9}"
    ]
    for row in result["rows"]:
        above = "-" if row["gap"] is None else f"{row['gap']:,}"
        strategies = "-" if row["strategies_used"] is None else f"{row['strategies_used']:,}"
        memory = "-" if row["memory_bytes"] is None else human_bytes(row["memory_bytes"])
        note = f"  ({row['algorithm_used']})" if row["algorithm_used"] != row["algorithm"] else ""
        lines.append(
            f"{row['algorithm']:<10} {row['depth']!s:>5} {row['packs']:>13,} {above:>12}"
            f" {100 * row['efficiency']:>9.3f} % {row['packing_factor']:>7.4f} {strategies:>10}"
            f" {_short_time(row['seconds']):>9} {memory:>9}{note}"
        )
    return lines


def _short_time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else human_seconds(seconds)
