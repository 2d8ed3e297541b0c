"""The command that tells what packing would give, before anything is written: estimate; and the tables it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gaudi_bert.cli import arguments, output
from gaudi_bert.common.errors import InputError, enumerated
from gaudi_bert.common.progress import Reporter, count_of, human_seconds

if TYPE_CHECKING:  # they need numpy, and `--help` does without
    from gaudi_bert.reporting.estimate import EstimateResult, EstimateRow, TaskEstimate

_Picture = Annotated[Path | None, typer.Option(help="Also draw a chart, as PNG or SVG.")]


@arguments.reads_rows("label_column", "too_long")
def estimate(
    source: Annotated[
        list[str],
        typer.Argument(
            help="TFRecords, HDF5, a table, a histogram.json, a shipped one (wikipedia-512), or with --task a file of rows.",
            show_default=False,
        ),
    ],
    depths: Annotated[
        str | None, typer.Option(help="Depths to compare.", show_default="1,2,3,4,8,max; with --task 3,6,12,max")
    ] = None,
    algorithms: Annotated[str, typer.Option(help="Algorithms to compare.")] = "none,spfhp,lpfhp,nnls,optimal",
    max_sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Slots per pack; default: as in SOURCE.", show_default=False)
    ] = None,
    input_column: arguments.InputColumn = None,
    picture: _Picture = None,
    details: Annotated[bool, typer.Option("--details", help="Also print times, other lengths and un-padding.")] = False,
    task: arguments.Task = None,
    model: Annotated[Path | None, typer.Option(help="With --task: a folder with the tokenizer.")] = None,
    row_lengths: Annotated[str, typer.Option(help="With --task: row lengths to compare, in tokens.")] = "128,256,384,512",
    rows: arguments.RowOptions = arguments.NO_ROW_OPTIONS,
    set_: arguments.SetTask = None,
    json: arguments.Json = False,
) -> None:
    """Show what packing would give at each depth and with each algorithm; nothing is written."""
    from gaudi_bert.reporting import estimate

    data = arguments.one_source(source)
    if task is not None:
        _estimate_task(data, task, model, row_lengths, depths or "3,6,12,max", rows, set_, json)
        return
    for option, _ in rows.by_key().values():
        raise InputError(f"{option} is for rows of text; say of which task they are with --task")
    requested = (depths or "1,2,3,4,8,max").split(",")
    result = estimate.estimate(
        data,
        depths=requested,
        algorithms=algorithms.split(","),
        picture=picture,
        reporter=Reporter(),
        max_sequence_length=max_sequence_length,
        input_column=input_column or "input_ids",
    )
    output.print_result(result, json, describe_details(result) if details else describe_estimate(result))


def _estimate_task(
    source: str,
    task: str,
    model: Path | None,
    row_lengths: str,
    depths: str,
    rows: arguments.RowOptions,
    set_: list[str] | None,
    json: bool,
) -> None:
    from gaudi_bert.reporting.estimate import estimate_task, parse_depth
    from gaudi_bert.tasks.models.task_models import encoder_sizes

    if model is None:
        raise InputError("--task needs --model DIR, a folder with the tokenizer")
    if not all(length.strip().isdigit() and int(length) >= 3 for length in row_lengths.split(",")):
        raise InputError(f"--row-lengths {row_lengths}: write integers from 3, with commas between")
    result = estimate_task(
        source,
        model,
        arguments.task_settings(set_, {"task.name": ("--task", task), **rows.by_key()}),
        row_lengths=[int(length) for length in row_lengths.split(",")],
        depths=[parse_depth(depth) for depth in depths.split(",")],
        sizes_of=encoder_sizes,
        reporter=Reporter(),
    )
    output.print_result(result, json, describe_task_estimate(result))


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
        for row in result.unpadding.rows
    ]
    return lines


def describe_task_estimate(result: TaskEstimate) -> list[str]:
    """Packs, and sequences in each, by the length of a row and by depth."""
    rows = result.rows
    depths = list(dict.fromkeys(row.depth for row in rows))
    lines = [
        f"{result.source}: {count_of(result.sequences, 'sequence')} ({result.task}), {result.mean_length:.2f} "
        f"tokens on average, the longest {result.longest:,}",
        "",
        "Packs (sequences in each), by tokens of a row and the most sequences that a pack may hold:",
        f"  {'row':>6} {'cut':>8}" + "".join(f"{depth:>20}" for depth in depths),
    ]
    for length in dict.fromkeys(row.max_sequence_length for row in rows):
        own = [row for row in rows if row.max_sequence_length == length]
        cells = [f"{row.packs:,} ({row.packing_factor:.3f})" for row in own]
        lines.append(f"  {length:>6} {own[0].cut:>8,}" + "".join(f"{cell:>20}" for cell in cells))
    above = [row for row in rows if row.gap]
    lines += ["", "Not proven to be the fewest possible:" if above else "No packing needs fewer: each is proven optimal."]
    lines += [
        f"  rows of {row.max_sequence_length}, depth {row.depth}: the proven minimum is {row.lower_bound:,}" for row in above
    ]
    chosen = result.chosen
    packs = [f"{packs:,} of {length:,}" for packs, length in zip(chosen.packs, chosen.lengths, strict=True)]
    several = f"{chosen.of_one_length:.2f} of that of one length, " if len(packs) > 1 else ""
    if result.task != "embedding":
        lines += [
            f"finetune --row-lengths auto: rows {enumerated(packs)}, of an estimated cost of",
            f"  {several}{chosen.of_padded_batches:.2f} of that of batches padded to their longest sequence",
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
    return (
        f"{count_of(best.packs, 'pack')} of {depth} ({best.algorithm}) replace {count_of(result.sequences, 'row')},"
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
