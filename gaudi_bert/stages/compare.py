"""The stage `compare`: our algorithms and other tools' packers on the same lengths, with the proven bound."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.common.arrays import AnyArray, Int32Array, permutation
from gaudi_bert.common.errors import ArgumentError, InputError, shortened, shown
from gaudi_bert.common.files import explained_os_errors, open_file, read_file
from gaudi_bert.common.progress import Reporter, measured
from gaudi_bert.packing.algorithms import depth_of, pack_histogram
from gaudi_bert.packing.heuristics import shuffled_lengths
from gaudi_bert.packing.histogram import Histogram, checked_lengths, histogram_of
from gaudi_bert.packing.peers import PEERS, ListedLengths
from gaudi_bert.records.tables.sources import TOKENS_COLUMN, is_table, read_column_lengths
from gaudi_bert.reporting import packing_pictures
from gaudi_bert.stages.estimate import check_picture, histogram_of_source, lengths_of_table

OURS = ("optimal", "nnls", "lpfhp")
SEED = 12345

_NPY = b"\x93NUMPY"
_WHOLE = re.compile(rb"\s*-?[0-9]{1,18}\s*")
"""A number as text: Python's own `int` takes more, as the digits of every script, and `1_000`."""
LENGTH_FILES = (".npy", ".txt", ".lengths")
PARQUET = re.compile(r"(?P<path>.*\.parquet)(?::(?P<column>[^/]+))?")


@dataclass(frozen=True)
class _CompareRow:
    """One packer.

    Attributes:
        tool: `gaudi-bert`, or the package that packs so.
        made_by: `gaudi-bert`; `package` where the other tool itself was called; `stand-in` for its heuristic, written anew.
        efficiency: real tokens / slots, 0..1.
        gap_share: the same, as a share of the bound.
        seconds: wall time, without compiling.
    """

    tool: str
    algorithm: str
    made_by: str
    packs: int
    efficiency: float
    gap: int
    gap_share: float
    seconds: float


@dataclass(frozen=True)
class CompareResult:
    """What `compare` prints.

    Attributes:
        depth: most sequences per pack; None for no limit.
        order: `as given`, or `shuffled` where only the numbers of sequences of each length are known.
        lower_bound: packs that no packing can do without, proven.
        rows: fewest packs first.
    """

    source: str
    max_sequence_length: int
    sequences: int
    tokens: int
    depth: int | None
    order: str
    lower_bound: int
    rows: list[_CompareRow]
    picture: str | None = None


def compare(
    source: str,
    *,
    max_sequence_length: int | None = None,
    depth: str | int = "max",
    picture: Path | None = None,
    reporter: Reporter,
    input_column: str | None = None,
) -> CompareResult:
    """Pack the same lengths with everybody's packer.

    Args:
        source: a file of lengths (`.npy`, `.txt`, `FILE.parquet[:COLUMN]`), a table of tokens, a histogram.json, a shipped
            histogram's name, or TFRecords.
        input_column: of a table, the tokens.
        max_sequence_length: slots of a pack; by default the longest length, or what the records or the histogram say.
        depth: most sequences per pack, or "max".
        picture: also draw it, as .png or .svg.
    """
    check_picture(picture)
    listed, order = _listed(source, max_sequence_length, input_column, reporter)
    most = depth_of(int(depth) if str(depth).isdigit() else depth, listed.slots)
    listed = replace(listed, depth=most)
    bound, rows = _pack_all(listed, reporter)
    result = CompareResult(
        source=source,
        max_sequence_length=listed.slots,
        sequences=listed.histogram.sequences,
        tokens=listed.histogram.tokens,
        depth=None if depth == "max" else most,
        order=order,
        lower_bound=bound,
        rows=sorted(rows, key=lambda row: row.packs),
    )
    return result if picture is None else _draw(result, picture, reporter)


def _listed(
    source: str, max_sequence_length: int | None, input_column: str | None, reporter: Reporter
) -> tuple[ListedLengths, str]:
    """The sequences one by one, and whether their order is that of the source."""
    read = _read_lengths(source, max_sequence_length, input_column)
    if read is None:
        histogram = histogram_of_source(source, reporter, max_sequence_length)
        shuffled = shuffled_lengths(histogram.counts, SEED)
        return ListedLengths(shuffled, shuffled, histogram, histogram.max_sequence_length), "shuffled"
    lengths, slots = read
    in_order: Int32Array = lengths.astype(np.int32)
    shuffled = in_order[permutation(in_order.size, SEED, "compare")]
    return ListedLengths(in_order, shuffled, histogram_of(lengths, slots), slots), "as given"


def _pack_all(listed: ListedLengths, reporter: Reporter) -> tuple[int, list[_CompareRow]]:
    """The best proven bound, and a row for each packer; each packs a few lengths first, so that no time is a compiler's."""
    bounds: list[int] = []

    def ours(algorithm: str) -> Callable[[ListedLengths], int]:
        def count(lengths: ListedLengths) -> int:
            packing = pack_histogram(lengths.histogram, algorithm, lengths.depth)
            bounds.append(packing.lower_bound if lengths is listed else 0)
            return packing.packs

        return count

    packers = [("gaudi-bert", name, "gaudi-bert", ours(name)) for name in OURS]
    for peer in PEERS:
        if peer.installed is not None and peer.callable_for(listed):
            packers.append((peer.tool, peer.algorithm, "package", peer.installed))
        else:
            packers.append((peer.tool, peer.algorithm, "stand-in", peer.count))
    lengths = np.repeat(np.arange(1, 17, dtype=np.int32), np.arange(1, 17))
    few = ListedLengths(lengths, lengths, Histogram(16, np.arange(1, 17)), 3)
    runs = []
    with reporter.task("compare", len(packers), "packers") as task:
        for *_, count in packers:
            count(few)
            runs.append(measured(lambda count=count: count(listed)))  # type: ignore[misc]
            task.advance()
    bound, tokens = max(bounds), listed.histogram.tokens
    return bound, [
        _CompareRow(
            tool,
            algorithm,
            made_by,
            packs=run.result,
            efficiency=tokens / (run.result * listed.slots),
            gap=run.result - bound,
            gap_share=(run.result - bound) / bound,
            seconds=round(run.seconds, 4),
        )
        for (tool, algorithm, made_by, _), run in zip(packers, runs, strict=True)
    ]


def _draw(result: CompareResult, picture: Path, reporter: Reporter) -> CompareResult:
    rows: list[dict[str, Any]] = [
        {"name": f"{row.tool} {row.algorithm}", "ours": row.tool == "gaudi-bert", "gap": row.gap, "share": row.gap_share}
        for row in result.rows
    ]
    title = f"{result.source}: packs above the {result.lower_bound:,} that are proven necessary"
    packing_pictures.save_picture(packing_pictures.draw_comparison(rows, title), picture)
    reporter.say(f"picture: {picture}")
    return replace(result, picture=str(picture))


def _read_lengths(source: str, max_sequence_length: int | None, column: str | None) -> tuple[AnyArray, int] | None:
    """The lengths in a file or of a table, in order, and the slots of a pack; None where `source` holds none one by one.

    Args:
        source: `.npy`, text with one length a line (`.txt`, `.lengths`), `FILE.parquet[:COLUMN]`, or a table.
    """
    parquet = PARQUET.fullmatch(source)
    path = Path(parquet["path"] if parquet else source)
    is_one_file = bool(parquet) and (path.is_file() or not is_table(source))
    if not is_one_file and path.suffix not in LENGTH_FILES and not is_table(source):
        return None
    if (is_one_file or path.suffix in LENGTH_FILES) and not path.is_file():
        raise InputError(f"{path}: no such file; give a file of lengths, a histogram.json, or TFRecords")
    if parquet and is_one_file:
        values = read_column_lengths(path, parquet["column"] or column)
    elif is_table(source):
        values = lengths_of_table(source, column or TOKENS_COLUMN)
    else:
        values = _read_npy(path) if path.suffix == ".npy" else _read_text(path)
    if not values.size:
        raise InputError(f"{path}: holds no lengths; give a file with at least one")
    try:
        slots = max_sequence_length or max(1, int(values.max(initial=1)) if values.dtype.kind in "iu" else 1)
        return checked_lengths(values, slots), slots
    except ArgumentError as error:
        raise InputError(f"{path}: {error}") from None


def _read_npy(path: Path) -> AnyArray:
    """The array of a file, mapped: its header may claim more than there is, and nothing is reserved for that."""
    with explained_os_errors(path, "read"), open_file(path) as handle:
        if handle.read(len(_NPY)) != _NPY:
            raise InputError(f"{path}: cannot be read as .npy: it is of another format; save one array with numpy.save")
    try:
        loaded: AnyArray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, OverflowError, SyntaxError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as .npy: {shortened(str(error), 160)}; save it again") from error
    return loaded


def _read_text(path: Path) -> AnyArray:
    """One whole number a line; blank lines at the end are ignored."""
    lines = read_file(path).rstrip().split(b"\n")
    values = np.zeros(len(lines), np.int64)
    for index, line in enumerate(lines):
        if not _WHOLE.fullmatch(line):
            text = line.decode("utf-8", "replace").strip()
            raise InputError(f"{path}: line {index + 1}: {shown(text)} is not a length; write one whole number a line")
        values[index] = int(line)
    return values
