"""Files of labelled rows to tokenized sequences, a window of rows at a time, and what distinguishes a file from others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import explained_os_errors
from gaudi_bert.config.tasks import TaskName, TaskSettings

if TYPE_CHECKING:
    from gaudi_bert.tasks.rows.tokenizer import RowTokenizer
    from gaudi_bert.tasks.rows.types import Row, Sequences

__all__ = ["file_identity", "labels_of", "tokenized_file"]

WINDOW_ROWS = 20_000


def file_identity(path: Path) -> str:
    """Name and SHA-256 of a file."""
    digest = hashlib.sha256()
    with explained_os_errors(path, "read"), open(path, "rb") as handle:
        while block := handle.read(2**20):
            digest.update(block)
    return f"{path.name}:{digest.hexdigest()}"


def labels_of(path: Path, task: TaskName, settings: TaskSettings) -> tuple[str, ...]:
    """The names of all labels of a file of rows (or those that `task.labels` names); () for a task without any.

    Raises:
        InputError: the file cannot be read, or a row is wrong.
    """
    from gaudi_bert.tasks.rows.labels import find_labels
    from gaudi_bert.tasks.rows.reading import read_rows

    if task not in ("classification", "multi-label", "token-classification"):
        return ()
    names = find_labels(read_rows(path, task, settings, labelled=True), task, settings.labels)
    if len(names) < 2:
        found = f"only the label {names[0]!r}" if names else "no label"
        raise InputError(f"{path}: has {found}; there must be at least two to tell apart")
    return names


def tokenized_file(
    path: Path,
    task: TaskName,
    settings: TaskSettings,
    tokenizer: RowTokenizer,
    labels: tuple[str, ...],
    max_sequence_length: int,
    *,
    keep_rows: bool,
) -> tuple[Sequences, tuple[Row, ...]]:
    """All sequences of a file of labelled rows, and the rows themselves where they are wanted.

    Raises:
        InputError: the file holds no rows, or a row is wrong, too long, or has a label that is not among `labels`.
    """
    from gaudi_bert.tasks.rows.reading import read_rows, windows
    from gaudi_bert.tasks.rows.tokenizing import tokenize_rows
    from gaudi_bert.tasks.rows.types import join_sequences

    labelled = not task.endswith("-language-modelling")
    parts, counts, kept = [], [], []
    for rows in windows(read_rows(path, task, settings, labelled=labelled), WINDOW_ROWS):
        parts.append(
            tokenize_rows(
                rows,
                tokenizer,
                task=task,
                settings=settings,
                max_sequence_length=max_sequence_length,
                labels=labels,
                file=path,
            )
        )
        counts.append(len(rows))
        kept += rows if keep_rows else []
    if not parts:
        raise InputError(f"{path}: holds no rows; give a file with at least one")
    return join_sequences(parts, counts), tuple(kept)
