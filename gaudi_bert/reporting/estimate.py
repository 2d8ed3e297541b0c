"""Estimates how well sequences can be packed with several algorithms at several depths, for `gaudi-bert estimate`.

`estimate_packing_efficiency` computes a histogram of lengths from its source, packs this histogram with every algorithm at
every depth, and returns one row per packing. The result also contains estimates for other pack lengths, and a comparison
with un-padding. The sequences themselves are not packed, and nothing is written except for the optional pictures.
"""

from __future__ import annotations

import csv
import difflib
import glob
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.histogram import HistogramFile
from gaudi_bert.artefacts.mirrored_folder import open_local_copy
from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.arrays import AnyArray, IntArray, find_index_of_invalid_integer
from gaudi_bert.common.errors import InputError, require_libraries, shorten
from gaudi_bert.common.files import read_file
from gaudi_bert.common.progress import Reporter, format_count, format_seconds
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.packing.algorithms import check_algorithm_name, pack_histogram, resolve_depth
from gaudi_bert.packing.bounds import prove_lower_bound
from gaudi_bert.packing.estimate import (
    ESTIMATE_ALGORITHMS,
    Estimate,
    LengthEstimate,
    UnpaddingEstimate,
    compare_with_unpadding,
    estimate_longer_packs,
    estimate_packing,
)
from gaudi_bert.packing.histogram import MAX_ROW_LENGTH, Histogram, count_lengths, resize_histogram
from gaudi_bert.packing.strategies import create_budget_for_estimates
from gaudi_bert.reporting import packing_pictures
from gaudi_bert.tables.groups import count_row_tokens
from gaudi_bert.tables.sources import TOKENS_COLUMN, is_table, list_table_files
from gaudi_bert.tfrecords.plan import build_histogram, count_records

# An estimate tries most algorithms with several depths, which limit the sequences per pack. These algorithms are tried only
# once, and the table shows the depth given here. `none` and `sort` do not use the depth. The packing paper runs the other
# three without a limit.
FIXED_DEPTHS: dict[str, str | int] = {"none": 1, "sort": 1, "greedy": "max", "greedy+1": "max", "greedy+2": "max"}


@dataclass(frozen=True)
class EstimateResult:
    """The result of `estimate`.

    Attributes:
        source: The source of the lengths, as the user typed it.
        max_sequence_length: The number of slots of a pack.
        sequences: The number of sequences.
        tokens: The number of tokens in all sequences.
        token_bound: The number of packs that the tokens would need if every slot were filled.
        rows: One estimate for each algorithm and depth.
        length_scan: Estimates for other pack lengths.
        unpadding: The comparison with un-padding, for each number of accelerators.
        pictures: The names of the pictures that were written, or None if none were requested.
    """

    source: str
    max_sequence_length: int
    sequences: int
    tokens: int
    token_bound: int
    rows: list[Estimate]
    length_scan: list[LengthEstimate]
    unpadding: list[UnpaddingEstimate]
    pictures: list[str] | None = None

    def format_lines(self, *, details: bool = False) -> list[str]:
        """Return lines of text that describe the result.

        Args:
            details: Whether to show times, other pack lengths and the comparison with un-padding instead of the overview.
        """
        return _format_details(self) if details else _format_overview(self)


def estimate_packing_efficiency(
    source: str | Path,
    *,
    depths: Sequence[str | int],
    algorithms: Sequence[str],
    picture: Path | None = None,
    reporter: Reporter,
    max_sequence_length: int | None = None,
    input_column: str = TOKENS_COLUMN,
) -> EstimateResult:
    """Estimate how well each algorithm packs the sequences of a source at each depth.

    Args:
        source: A histogram.json, the name of a bundled histogram such as `wikipedia-512`, a file of lengths, a table with a
            column of token ids, or unpacked records (a folder, a file or a glob pattern), which are counted first.
        depths: The depths, each a number or "max".
        algorithms: The names of the algorithms.
        picture: The file for a picture of the efficiency at each depth, as .png or .svg. Three more pictures are written
            next to it, with `-histogram` (the lengths with the proven bound), `-mixture` (the strategies) and `-scaling`
            (packing compared with un-padding) in their names. If it is None, nothing is drawn.
        reporter: Shows progress.
        max_sequence_length: The number of slots of a pack. By default, it is that of the histogram or of the records. For a
            table or a file of lengths, it is the longest sequence.
        input_column: The column of a table that contains the token ids.

    Raises:
        InputError: The source cannot be read, a depth or algorithm is not valid, or matplotlib is needed and not installed.
    """
    requested = [parse_packing_depth(depth) for depth in depths]
    names = [name.strip() for name in algorithms]
    for name in names:
        check_algorithm_name(name, ESTIMATE_ALGORITHMS)
    if picture is not None:
        packing_pictures.get_picture_format(picture)
        require_libraries(["matplotlib"], "a picture")
    histogram = _read_histogram(source, reporter, max_sequence_length, input_column)
    rows = _estimate_packings(histogram, requested, names, reporter)
    best_factor = max((row.packing_factor for row in rows if row.algorithm != "sort"), default=1.0)
    result = EstimateResult(
        source=str(source),
        max_sequence_length=histogram.max_sequence_length,
        sequences=histogram.sequences,
        tokens=histogram.tokens,
        token_bound=histogram.min_packs_by_tokens,
        rows=rows,
        length_scan=estimate_longer_packs(histogram, requested[-1]),
        unpadding=compare_with_unpadding(histogram, best_factor),
    )
    if picture is None:
        return result
    default_depth = PackingSettings().depth
    depth = default_depth if default_depth in requested else requested[-1]
    return replace(result, pictures=_draw_and_save_charts(histogram, result, depth, picture, reporter))


def parse_packing_depth(depth: str | int) -> str | int:
    """Convert a depth that the user typed to an integer. Return "max" unchanged.

    Raises:
        InputError: The depth is neither an integer from 1 nor "max".
    """
    text = str(depth).strip()
    if text == "max":
        return text
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"--depths: {text!r} is not a depth; pass positive integers or `max`, separated by commas")
    return int(text)


def _estimate_packings(
    histogram: Histogram, depths: Sequence[str | int], algorithms: Sequence[str], reporter: Reporter
) -> list[Estimate]:
    """Pack a histogram with each algorithm at each depth, and return one estimate for each packing.

    The search for good packings of long packs and for their bounds could take hours. Therefore all searches share one
    budget.
    """

    def to_number(depth: str | int) -> int:
        """Return the maximum number of sequences in a pack. For "max", this is the pack length, because every sequence has
        at least one token.
        """
        return resolve_depth(depth, histogram.max_sequence_length)

    jobs = [(name, depth) for name in algorithms for depth in ([FIXED_DEPTHS[name]] if name in FIXED_DEPTHS else depths)]
    limits = sorted({to_number(depth) for _, depth in jobs})
    rows: list[Estimate] = []
    budget = create_budget_for_estimates(histogram.max_sequence_length)
    with reporter.task("estimate", len(limits) + len(jobs), "packings") as task:
        bounds = {}
        for limit in limits:
            share = budget and budget.take_fraction(1 / (len(limits) + len(jobs)))
            bounds[limit] = prove_lower_bound(histogram.counts, limit, share).bound
            task.advance()
        for name in algorithms:  # compile the kernels now, so that the measured times do not include their compilation
            estimate_packing(Histogram(16, np.arange(1, 17)), name, 3, None)
        for index, (name, depth) in enumerate(jobs):
            # Give each packing an equal share of the remaining search budget. What a packing does not use is divided among
            # the later packings.
            share = budget and budget.take_fraction(1 / (len(jobs) - index))
            rows.append(estimate_packing(histogram, name, depth, bounds[to_number(depth)], budget=share))
            bounds[to_number(depth)] = max(bounds[to_number(depth)], rows[-1].lower_bound or 0)
            task.advance()
    # A lower bound on the number of packs at a depth holds for all algorithms. Therefore give every estimate the best bound
    # that was found for its depth.
    return [row if row.lower_bound is None else replace(row, lower_bound=bounds[to_number(row.depth)]) for row in rows]


def _draw_and_save_charts(
    histogram: Histogram, result: EstimateResult, depth: str | int, picture_path: Path, reporter: Reporter
) -> list[str]:
    """Draw the four pictures of an estimate, write them to files, and return the paths of the files.

    The pictures `-histogram` and `-mixture` show a single packing, which the algorithm `nnls` makes at `depth`.
    """
    packing = pack_histogram(histogram, "nnls", depth)
    prices = packing.certificate.prices.tolist()
    figures = {
        "": packing_pictures.draw_efficiency_over_depth([asdict(row) for row in result.rows if row.algorithm != "sort"]),
        "-histogram": packing_pictures.draw_histogram(histogram.counts.tolist(), packing.packs, packing.lower_bound, prices),
        "-mixture": packing_pictures.draw_strategy_counts(packing.strategy_counts, histogram.max_sequence_length),
        "-scaling": packing_pictures.draw_unpadding([asdict(row) for row in result.unpadding]),
    }
    paths = [picture_path.with_name(f"{picture_path.stem}{suffix}{picture_path.suffix}") for suffix in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        packing_pictures.save_picture(figure, path)
    reporter.say(f"pictures: {', '.join(str(path) for path in paths)}")
    return [str(path) for path in paths]


# --- the source of the lengths: a file, a table, records that are counted, or a bundled histogram
#
# The bundled histograms are those of the packing paper (Krell et al., 2021): Wikipedia with 128 to 2048 tokens, and SQuAD
# with 384 tokens.

_HISTOGRAMS_FOLDER = Path(__file__).resolve().parents[1] / "histograms"


def _read_histogram(
    source: str | Path, reporter: Reporter, max_sequence_length: int | None = None, input_column: str = TOKENS_COLUMN
) -> Histogram:
    """Return a histogram of the sequence lengths in a source. The arguments are those of `estimate_packing_efficiency`."""
    if is_table(source):
        with open_local_copy(source) as table:
            return _count_checked_lengths(
                count_row_tokens(list_table_files(table), input_column).astype(np.int64), max_sequence_length
            )
    bundled, ending = _find_bundled_histogram(source), Path(source).suffix.lower()
    if bundled is None and ending in _READERS:
        with open_local_copy(source) as path:
            if path.is_file() and (ending != ".json" or read_file(path)[:_LIST_START_BYTES].lstrip().startswith(b"[")):
                return _count_checked_lengths(_read_lengths(path), max_sequence_length)
    if bundled is not None or ending == ".json":
        with open_local_copy(bundled or Path(source)) as path:
            histogram = build_histogram(HistogramFile.read_and_merge([path]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            counted = Path(folder) / "histogram.json"
            count_records(source, counted, StageRun(reporter))
            histogram = build_histogram(HistogramFile.read_and_merge([counted]))
    return histogram if max_sequence_length is None else resize_histogram(histogram, max_sequence_length)


def _count_checked_lengths(lengths: IntArray, max_sequence_length: int | None) -> Histogram:
    """Return a histogram of the given sequence lengths. Raise an error if a sequence is longer than a pack.

    Args:
        lengths: The length of each sequence.
        max_sequence_length: The number of slots of a pack. By default, it is the length of the longest sequence.

    Raises:
        InputError: A sequence is longer than `max_sequence_length`.
    """
    longest = int(lengths.max(initial=1))
    if max_sequence_length is not None and longest > max_sequence_length:
        raise InputError(
            f"--max-sequence-length {max_sequence_length:,}: sequence {int(np.argmax(lengths)) + 1:,} has {longest:,} "
            "tokens; increase the value"
        )
    return count_lengths(lengths, max_sequence_length or longest)


def list_bundled_histograms() -> dict[str, Path]:
    """Return the paths of the bundled histograms by name, sorted by data set and length."""
    named = [(path.stem.rpartition("-"), path) for path in _HISTOGRAMS_FOLDER.glob("*.json")]
    return {path.stem: path for _, path in sorted(named, key=lambda item: (item[0][0], int(item[0][2])))}


def _find_bundled_histogram(source: str | Path) -> Path | None:
    """Return the path of a bundled histogram, or None if there is no bundled histogram called `source`.

    If a file or folder with this name exists, it is used instead of the bundled histogram.

    Raises:
        InputError: The source does not exist, but its name is similar to that of a bundled histogram.
    """
    name, bundled = str(source), list_bundled_histograms()
    if Path(name).exists() or glob.has_magic(name):
        return None
    near = difflib.get_close_matches(name, bundled, n=1, cutoff=0.7)
    if name not in bundled and near:
        raise InputError(
            f"{name}: no such file or folder; did you mean `{near[0]}`? The built-in histograms are {', '.join(bundled)}"
        )
    return bundled.get(name)


# --- files of lengths: a text file, a JSON list, a numpy array, or a column of a CSV file
#
# The file contains the length of each sequence, in any order.

# If a CSV file has several columns, the column with the first of these names contains the sequence lengths. Case is ignored.
_LENGTH_COLUMNS = ("length", "lengths", "tokens", "num_tokens", "n_tokens", "seq_len", "sequence_length")

_LIST_START_BYTES = 4096


def _read_lengths(path: Path) -> IntArray:
    """Read the sequence lengths in a file, and return them as int64 [sequences].

    Raises:
        InputError: The file does not contain one number per sequence, or a length is out of range.
    """
    try:
        values = _READERS[path.suffix.lower()](path)
    except (ValueError, OverflowError, EOFError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path}: the file is not a list of lengths ({shorten(str(error))}); write one integer per sequence"
        ) from error
    if values.ndim != 1 or not values.size:
        raise InputError(f"{path}: the file contains an array of shape {list(values.shape)}; write one integer per sequence")
    wrong = find_index_of_invalid_integer(values, 1, MAX_ROW_LENGTH)
    if wrong >= 0:
        raise InputError(
            f"{path}: length {wrong + 1:,} is {values[wrong]!s}, but must be an integer from 1 to {MAX_ROW_LENGTH:,}; "
            "correct it"
        )
    result: IntArray = values.astype(np.int64)
    return result


def _read_csv_lengths(path: Path) -> AnyArray:
    """Read the sequence lengths in a CSV or TSV file.

    The separator is detected, and whether the first line is a header.
    """
    text = _read_utf8(path)
    separator = max(",;\t", key=text.split("\n", 1)[0].count)
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if any(map(str.strip, row))]
    are_numbers = rows and all(cell.strip().lstrip("+-").replace(".", "", 1).isdigit() for cell in rows[0])
    header = [] if are_numbers or not rows else rows[0]
    column = 0
    if header and len(header) > 1:
        names = [name.strip().lower() for name in header]
        known = [name for name in _LENGTH_COLUMNS if name in names]
        if not known:
            raise InputError(
                f"{path}: cannot tell which of the columns {', '.join(header)} contains the lengths; rename that column "
                "to `length`"
            )
        column = names.index(known[0])
    elif rows and len(rows[0]) > 1:
        raise InputError(f"{path}: the file has {len(rows[0])} columns but no header; keep only the column with the lengths")
    return _parse_integers([row[column].strip() if column < len(row) else "" for row in rows[bool(header) :]])


def _read_utf8(path: Path) -> str:
    """Read a UTF-8 text file. A byte order mark is removed."""
    return read_file(path).decode("utf-8-sig")


def _parse_integers(words: list[str]) -> AnyArray:
    """Convert a list of words to an array of integers.

    Raises:
        ValueError: A word is not an integer. The message names the first such word.
    """
    return np.array([int(word) for word in words], dtype=np.int64 if words else np.float64)


_READERS: dict[str, Callable[[Path], AnyArray]] = {
    ".txt": lambda path: _parse_integers(_read_utf8(path).replace(",", " ").split()),
    ".json": lambda path: np.asarray(json.loads(_read_utf8(path))),
    ".npy": lambda path: np.load(io.BytesIO(read_file(path)), allow_pickle=False),
    ".csv": _read_csv_lengths,
    ".tsv": _read_csv_lengths,
}


# --- the lines that are printed

_LABEL_WIDTH = 26


def _format_overview(result: EstimateResult) -> list[str]:
    """Format the overview of an estimate. It contains the efficiency and the gap to the proven bound at each depth, and a
    sentence about the best packing.
    """
    rows = [row for row in result.rows if row.gap is not None]
    depths = sorted({row.depth for row in rows}, key=lambda depth: (depth == "max", depth))
    lines = [*_format_headline(result), ""]
    if rows:
        bounds = [max(row.lower_bound or 0 for row in rows if row.depth == depth) for depth in depths]
        lines += [
            "Share of slots that hold tokens, by depth (the largest number of sequences in a pack):",
            _format_table_row("", [f"{depth:,}" if depth != "max" else "max" for depth in depths]),
            *_format_table(rows, depths, lambda row: f"{100 * row.efficiency:.2f} %"),
            "",
            "Packs more than the proven minimum:",
            *_format_table(rows, depths, lambda row: f"{row.gap:,}"),
            _format_table_row("proven minimum", [f"{bound:,}" for bound in bounds]),
            "",
            _format_conclusion(result, rows),
        ]
    lines += [
        f"{row.algorithm}: if batches are padded to their longest sequence, {100 * row.efficiency:.2f} % of the slots hold "
        "tokens"
        for row in result.rows
        if row.gap is None
    ]
    return lines


def _format_details(result: EstimateResult) -> list[str]:
    """Format the details of an estimate. They include the time of each packing, other pack lengths, and the comparison with
    un-padding.
    """
    return [
        *_format_headline(result),
        "",
        *_format_all_packings(result),
        "",
        "packs of other lengths (LPFHP; slots and cost of attention relative to one sequence per row):",
        *(
            f"  {row.max_sequence_length:>6}: {row.packs:>12,} packs, efficiency {100 * row.efficiency:.2f} %,"
            f" {row.fewer_slots:.3f} times fewer slots, {row.attention_cost:.3f} times the cost of attention"
            for row in result.length_scan
        ),
        "",
        "speed-up by number of accelerators: un-padding (packing paper) / ideal un-padding of these data / packing:",
        *(
            f"  {row.accelerators:>6}: {row.unpadding:.3f} / {row.ideal_unpadding:.3f} / {row.packing:.3f}"
            for row in result.unpadding
        ),
    ]


def _format_headline(result: EstimateResult) -> list[str]:
    """Format two lines about the sequences before they are packed."""
    efficiency = result.tokens / (result.sequences * result.max_sequence_length)
    return [
        f"{result.source}: {format_count(result.sequences, 'sequence')} of up to {result.max_sequence_length:,} tokens",
        f"With one sequence per row, {100 * efficiency:.2f} % of the slots hold tokens; full packs would need "
        f"{format_count(result.token_bound, 'row')}.",
    ]


def _format_table_row(label: str, cells: list[str]) -> str:
    """Format one line of a table. It begins with a label, and its cells are right-aligned."""
    width = max(11, *(len(cell) + 2 for cell in cells))
    return f"  {label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>{width}}" for cell in cells)


def _format_table(rows: list[Estimate], depths: list[int | str], format_cell: Callable[[Estimate], str]) -> list[str]:
    """Format a table with one line per algorithm and one column per depth.

    Args:
        rows: The estimates.
        depths: The depths, in the order of the columns.
        format_cell: Returns the text in the cell of an estimate.
    """
    lines = []
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        cells = {row.depth: format_cell(row) for row in rows if row.algorithm == algorithm}
        lines.append(_format_table_row(algorithm, [cells.get(depth, "") for depth in depths]).rstrip())
    return lines


def _format_conclusion(result: EstimateResult, rows: list[Estimate]) -> str:
    """Describe the packing with the fewest packs in a sentence. If several packings need equally few packs, choose the one
    with the smallest depth.
    """
    best = min(rows, key=lambda row: (row.packs, row.depth == "max", row.depth))
    depth = "unlimited depth" if best.depth == "max" else f"depth {best.depth}"
    proven = "no packing needs fewer" if best.gap == 0 else f"the proven minimum is {best.lower_bound:,}"
    verb = "replaces" if best.packs == 1 else "replace"
    return (
        f"{format_count(best.packs, 'pack')} of {depth} ({best.algorithm}) {verb} {format_count(result.sequences, 'row')},"
        f" {best.packing_factor:.3f} times fewer; {proven}."
    )


def _format_all_packings(result: EstimateResult) -> list[str]:
    """Format a table with one line for each algorithm and depth."""
    lines = [
        f"{'algorithm':<10} {'depth':>5} {'packs':>13} {'above bound':>12} {'efficiency':>11} {'factor':>7}"
        f" {'strategies':>10} {'time':>9}"
    ]
    for row in result.rows:
        seconds = row.seconds
        time = f"{1000 * seconds:.1f} ms" if seconds < 1 else format_seconds(seconds)
        above = "-" if row.gap is None else f"{row.gap:,}"
        strategies = "-" if row.strategies_used is None else f"{row.strategies_used:,}"
        note = f"  ({row.algorithm_used})" if row.algorithm_used != row.algorithm else ""
        lines.append(
            f"{row.algorithm:<10} {row.depth!s:>5} {row.packs:>13,} {above:>12}"
            f" {100 * row.efficiency:>9.3f} % {row.packing_factor:>7.4f} {strategies:>10}"
            f" {time:>9}{note}"
        )
    return lines
