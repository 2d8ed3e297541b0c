"""Lengths that a user has already: a text file, a list of JSON, an array of numpy, or a column of a CSV file.

One number a sequence, in any order; they are counted, and nothing is known of files or masked positions.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gaudi_bert.common.arrays import AnyArray, IntArray, first_not_whole
from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import read_file
from gaudi_bert.packing.histogram import MOST_SLOTS

LENGTH_ENDINGS = (".txt", ".npy", ".csv", ".tsv")
LENGTH_COLUMNS = ("length", "lengths", "tokens", "num_tokens", "n_tokens", "seq_len", "sequence_length")
"""Names of the column of a CSV file with several, in any case; the first that there is."""

_LIST_START_BYTES = 4096


def holds_lengths(path: Path) -> bool:
    """Whether a file is one of lengths: by its ending, or a .json that begins with a list."""
    if not path.is_file():
        return False
    if path.suffix.lower() != ".json":
        return path.suffix.lower() in LENGTH_ENDINGS
    return read_file(path)[:_LIST_START_BYTES].lstrip().startswith(b"[")


def read_lengths(path: Path) -> IntArray:
    """Int64 [sequences], from 1."""
    try:
        values = _READERS[path.suffix.lower()](path)
    except (ValueError, EOFError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: no list of lengths ({shortened(str(error))}); give one integer a sequence") from error
    if values.ndim != 1 or not values.size:
        raise InputError(f"{path}: holds an array of shape {list(values.shape)}; give one integer for each sequence")
    wrong = first_not_whole(values, 1, MOST_SLOTS)
    if wrong >= 0:
        raise InputError(f"{path}: length {wrong + 1:,} is {values[wrong]!s}; integers from 1 to {MOST_SLOTS:,} are allowed")
    result: IntArray = values.astype(np.int64)
    return result


def _from_csv(path: Path) -> AnyArray:
    text = _text(path)
    separator = max(",;\t", key=text.split("\n", 1)[0].count)
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if any(map(str.strip, row))]
    are_numbers = rows and all(cell.strip().lstrip("+-").replace(".", "", 1).isdigit() for cell in rows[0])
    header = [] if are_numbers or not rows else rows[0]
    column = 0
    if header and len(header) > 1:
        names = [name.strip().lower() for name in header]
        known = [name for name in LENGTH_COLUMNS if name in names]
        if not known:
            raise InputError(
                f"{path}: has the columns {', '.join(header)}; name that of the lengths `length`, or give it alone"
            )
        column = names.index(known[0])
    elif rows and len(rows[0]) > 1:
        raise InputError(f"{path}: has {len(rows[0])} columns without names; give that of the lengths alone")
    return _numbers([row[column].strip() if column < len(row) else "" for row in rows[bool(header) :]])


def _text(path: Path) -> str:
    return read_file(path).decode("utf-8-sig")


def _numbers(words: list[str]) -> AnyArray:
    """Integers, exactly; a word that is none raises a ValueError that names it."""
    return np.array([int(word) for word in words], dtype=np.int64 if words else np.float64)


_READERS: dict[str, Callable[[Path], AnyArray]] = {
    ".txt": lambda path: _numbers(_text(path).replace(",", " ").split()),
    ".json": lambda path: np.asarray(json.loads(_text(path))),
    ".npy": lambda path: np.load(io.BytesIO(read_file(path)), allow_pickle=False),
    ".csv": _from_csv,
    ".tsv": _from_csv,
}
