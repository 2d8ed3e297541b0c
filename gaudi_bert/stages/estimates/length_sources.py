"""What `compare` takes: lengths in a file (.npy, text, Parquet), or records and histograms, in which the order is lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.common.errors import ArgumentError, InputError, shown

if TYPE_CHECKING:
    from gaudi_bert.common.arrays import AnyArray
    from gaudi_bert.common.progress import Reporter
    from gaudi_bert.packing.histogram import Histogram

__all__ = ["LENGTH_FILES", "histogram_of_source", "read_lengths"]

LENGTH_FILES = (".npy", ".txt", ".lengths")
PARQUET = re.compile(r"(?P<path>.*\.parquet)(?::(?P<column>[^/]+))?")


def read_lengths(source: str, max_sequence_length: int | None) -> tuple[AnyArray, int] | None:
    """The lengths in a file, in order, and the slots of a pack; None where `source` is no file of lengths.

    Args:
        source: `.npy`, text with one length a line (`.txt`, `.lengths`), or `FILE.parquet[:COLUMN]`.
        max_sequence_length: None for the longest of them.

    Raises:
        InputError: it cannot be read, or one is no length; the line, row or index is named.
    """
    from gaudi_bert.packing.lengths import checked_lengths

    table = PARQUET.fullmatch(source)
    path = Path(table["path"] if table else source)
    if not table and path.suffix not in LENGTH_FILES:
        return None
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a file of lengths, a histogram.json, or TFRecords")
    if table:
        from gaudi_bert.records.tables.lengths import read_column_lengths

        values = read_column_lengths(path, table["column"])
    else:
        values = _read_npy(path) if path.suffix == ".npy" else _read_text(path)
    try:
        slots = max_sequence_length or max(1, int(values.max(initial=1)) if values.dtype.kind in "iu" else 1)
        return checked_lengths(values, slots), slots
    except ArgumentError as error:
        raise InputError(f"{path}: {error}") from None


def histogram_of_source(source: str, max_sequence_length: int | None, reporter: Reporter) -> Histogram:
    """How many sequences of each length a histogram, a shipped one's name or records have, in packs of so many slots.

    Raises:
        InputError: a bad source, or a sequence is longer than `max_sequence_length`.
    """
    from gaudi_bert.packing.histogram import rescaled
    from gaudi_bert.stages.estimates.estimate import histogram_of

    histogram = histogram_of(source, reporter)
    return histogram if max_sequence_length is None else rescaled(histogram, max_sequence_length)


def _read_npy(path: Path) -> AnyArray:
    import numpy as np

    try:
        loaded: AnyArray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read as .npy: {' '.join(str(error).split())}") from error
    return loaded


def _read_text(path: Path) -> AnyArray:
    """One whole number a line; lines that end the file without one are not missed."""
    import numpy as np

    lines = path.read_bytes().rstrip().split(b"\n")
    values = np.zeros(len(lines), np.int64)
    for index, line in enumerate(lines):
        try:
            values[index] = int(line)
        except (ValueError, OverflowError):
            text = line.decode("utf-8", "replace").strip()
            raise InputError(
                f"{path}: line {index + 1}: {shown(text)} is no length; write one whole number a line"
            ) from None
    return values
