"""The names of labels: from a file, or those that the training data has; and what of rows is to be learnt, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gaudi_bert.common.arrays import Float32Array, Int32Array
from gaudi_bert.common.errors import InputError, shown
from gaudi_bert.config.tasks import TaskName
from gaudi_bert.tasks.rows.types import Row, TaggedRow, TextRow, source_name

__all__ = ["find_labels", "numbers_of_labels", "read_label_names", "row_targets"]

OUTSIDE = "O"


def read_label_names(path: Path) -> tuple[str, ...]:
    """The names in a file, one a line; a line's number, from 0, is the label's.

    Raises:
        InputError: it cannot be read, or a name stands there twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(
            f"{path}: cannot read: {error.strerror}; --labels needs a file with a label's name a line"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    names = tuple(line.strip() for line in lines)
    while names and not names[-1]:
        names = names[:-1]
    for number, name in enumerate(names, start=1):
        if not name or names.index(name) != number - 1:
            problem = f"{name!r} stands there twice" if name else "is empty"
            raise InputError(f"{path}: row {number}: {problem}; write each label once, one a line")
    if not names:
        raise InputError(f"{path}: names no label; write one a line")
    return names


def find_labels(rows: Iterable[Row], task: TaskName, labels: str | Path | None = None) -> tuple[str, ...]:
    """The names of the labels of a task: those of the file `labels`, else those of the rows, sorted; of tags, `O` first."""
    if task not in ("classification", "multi-label", "token-classification"):
        return ()
    if labels is not None:
        return read_label_names(Path(labels))
    found: set[str] = set()
    for row in rows:
        if isinstance(row, TaggedRow):
            found.update(row.tags or ())
        elif isinstance(row, TextRow):
            found.update((row.label,) if isinstance(row.label, str) else row.label if isinstance(row.label, tuple) else ())
    return tuple(sorted(found, key=lambda name: (name != OUTSIDE, name)))


def numbers_of_labels(names: Sequence[str]) -> dict[str, int]:
    """The number of each label."""
    return {name: number for number, name in enumerate(names)}


def row_targets(
    rows: Sequence[Row], task: TaskName, numbers: Mapping[str, int], path: str | Path
) -> Int32Array | Float32Array | None:
    """What each text is to be: int32 [rows], float32 [rows, labels] of 0 and 1, or float32 [rows]; None without labels.

    Raises:
        InputError: a label is not one of the model's.
    """
    labels = [row.label if isinstance(row, TextRow) else None for row in rows]
    if None in labels:
        return None
    if task == "regression":
        return np.array(labels, np.float32)
    if task == "multi-label":
        targets = np.zeros((len(rows), len(numbers)), np.float32)
        for place, (row, names) in enumerate(zip(rows, labels, strict=True)):
            for name in names if isinstance(names, tuple) else ():
                targets[place, label_number(numbers, name, row.number, path)] = 1
        return targets
    return np.array(
        [label_number(numbers, str(label), row.number, path) for row, label in zip(rows, labels, strict=True)], np.int32
    )


def label_number(numbers: Mapping[str, int], name: str, number: int, path: str | Path) -> int:
    """The number of the label `name` of a row.

    Raises:
        InputError: the model does not know it.
    """
    if name not in numbers:
        known = ", ".join(list(numbers)[:8]) + (", ..." if len(numbers) > 8 else "")
        raise InputError(
            f"{source_name(path)}: row {number}: the label {shown(name)} is unknown, known are {known}; "
            "mend it, or train with data that has it"
        )
    return numbers[name]
