"""The command that tells what packing would give, before anything is written: estimate; and the tables it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.progress import Reporter, count_of, human_seconds

if TYPE_CHECKING:  # they need numpy, and `--help` does without
    from gaudi_bert.reporting.estimate import EstimateResult, EstimateRow

_Picture = Annotated[Path | None, typer.Option(help="Also draw a chart, as PNG or SVG.")]


def estimate(
    source: Annotated[
        list[str],
        typer.Argument(
            help="TFRecords, HDF5, a table, lengths (.txt, .csv, .npy, .json), a histogram.json or wikipedia-512.",
            show_default=False,
        ),
    ],
    depths: Annotated[str, typer.Option(help="Depths to compare.")] = "1,2,3,4,8,max",
    algorithms: Annotated[str, typer.Option(help="Algorithms to compare.")] = "none,spfhp,lpfhp,nnls,optimal",
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Slots per pack; default: as in SOURCE.", show_default=False)
    ] = None,
    input_column: Annotated[str, typer.Option(metavar="NAME", help="Tables: the column of token ids.")] = "input_ids",
    picture: _Picture = None,
    details: Annotated[bool, typer.Option("--details", help="Also print times, other lengths and un-padding.")] = False,
    json: arguments.Json = False,
) -> None:
    """Show what packing would give at each depth and with each algorithm; nothing is written."""
    from gaudi_bert.reporting import estimate

    data = arguments.one_source(source)
    result = estimate.estimate(
        data,
        depths=depths.split(","),
        algorithms=algorithms.split(","),
        picture=picture,
        reporter=Reporter(),
        max_sequence_length=max_sequence_length,
        input_column=input_column,
    )
    output.print_result(result, json, describe_details(result) if details else describe_estimate(result))


# --- the tables of `estimate`

_LABEL_WIDTH = 26


def describe_estimate(result: EstimateResult) -> list[str]:
    """The lines for a first look: efficiency and distance from the proven bound at each depth, and the best packing."""
    rows = [row for row in result.rows if row.gap is not None]
    depths = sorted({row.depth for row in rows}, key=lambda depth: (depth == "max", depth))
    lines = [*_headline(result), ""]
    if rows:
        bounds = [max(row.lower_bound or 0 for row in rows if row.depth == depth) for depth in depths]
        lines += [
            "Share of slots that hold tokens, by the most sequences that a pack may hold:",
            _cells("", [f"{depth:,}" if depth != "max" else "max" for depth in depths]),
            *_table(rows, depths, lambda row: f"{100 * row.efficiency:.2f} %"),
            "",
            "Packs above the proven minimum:",
            *_table(rows, depths, lambda row: f"{row.gap:,}"),
            _cells("proven minimum", [f"{bound:,}" for bound in bounds]),
            "",
            _conclusion(result, rows),
        ]
    lines += [
        f"{row.algorithm}: padded to the longest of a batch, {100 * row.efficiency:.2f} % of the slots hold tokens"
        for row in result.rows
        if row.gap is None
    ]
    return lines


def describe_details(result: EstimateResult) -> list[str]:
    """Every row with its time and memory, packs of other lengths, and packing compared with un-padding."""
    lines = [*_headline(result), "", *_all_rows(result)]
    lines += ["", "packs of another length (LPFHP; slots and attention relative to one sequence per row):"]
    lines += [
        f"  {row.max_sequence_length:>6}: {row.packs:>12,} packs, efficiency {100 * row.efficiency:.2f} %,"
        f" {row.fewer_slots:.3f} x fewer slots, attention x {row.attention_cost:.3f}"
        for row in result.length_scan
    ]
    lines += ["", "speed-up by number of accelerators: un-padding (paper E) / ideal un-padding of these data / packing:"]
    lines += [
        f"  {row.accelerators:>6}: {row.unpadding:.3f} / {row.ideal_unpadding:.3f} / {row.packing:.3f}"
        for row in result.unpadding
    ]
    return lines


def _headline(result: EstimateResult) -> list[str]:
    share, least = result.tokens / (result.sequences * result.max_sequence_length), result.token_bound
    return [
        f"{result.source}: {count_of(result.sequences, 'sequence')} of up to {result.max_sequence_length:,} tokens",
        f"One per row, {100 * share:.2f} % of the slots hold tokens; the tokens alone need {count_of(least, 'pack')}.",
    ]


def _cells(label: str, cells: list[str]) -> str:
    width = max(11, *(len(cell) + 2 for cell in cells))
    return f"  {label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>{width}}" for cell in cells)


def _table(rows: list[EstimateRow], depths: list[int | str], cell: Callable[[EstimateRow], str]) -> list[str]:
    """One line per algorithm, one column per depth."""
    lines = []
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        own = {row.depth: cell(row) for row in rows if row.algorithm == algorithm}
        lines.append(_cells(algorithm, [own.get(depth, "") for depth in depths]).rstrip())
    return lines


def _conclusion(result: EstimateResult, rows: list[EstimateRow]) -> str:
    """The fewest packs, at the smallest depth that gives them."""
    best = min(rows, key=lambda row: (row.packs, row.depth == "max", row.depth))
    depth = "unlimited depth" if best.depth == "max" else f"depth {best.depth}"
    proven = "no packing needs fewer" if best.gap == 0 else f"the proven minimum is {best.lower_bound:,}"
    verb = "replaces" if best.packs == 1 else "replace"
    return (
        f"{count_of(best.packs, 'pack')} of {depth} ({best.algorithm}) {verb} {count_of(result.sequences, 'row')},"
        f" {best.packing_factor:.3f} times fewer; {proven}."
    )


def _all_rows(result: EstimateResult) -> list[str]:
    lines = [
        f"{'algorithm':<10} {'depth':>5} {'packs':>13} {'above bound':>12} {'efficiency':>11} {'factor':>7}"
        f" {'strategies':>10} {'time':>9}"
    ]
    for row in result.rows:
        seconds = row.seconds
        time = f"{1000 * seconds:.1f} ms" if seconds < 1 else human_seconds(seconds)
        above = "-" if row.gap is None else f"{row.gap:,}"
        strategies = "-" if row.strategies_used is None else f"{row.strategies_used:,}"
        note = f"  ({row.algorithm_used})" if row.algorithm_used != row.algorithm else ""
        lines.append(
            f"{row.algorithm:<10} {row.depth!s:>5} {row.packs:>13,} {above:>12}"
            f" {100 * row.efficiency:>9.3f} % {row.packing_factor:>7.4f} {strategies:>10}"
            f" {time:>9}{note}"
        )
    return lines
