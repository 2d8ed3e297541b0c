"""Files of labelled rows: tokenized a window of rows at a time, identified by their content, or built from docstrings."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from pathlib import Path

from gaudi_bert.artefacts.completion import Signature, begin_artefact
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import BUILT_IN_ROWS
from gaudi_bert.common.files import exclusive_lock, explained_os_errors, open_file, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.corpus.python_texts import HELD_OUT_OF, LABELS, LabelledText, labelled_docstrings, python_texts
from gaudi_bert.rows.fields import find_labels
from gaudi_bert.rows.reading import read_rows, windows
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.tokenizing import tokenize_rows
from gaudi_bert.rows.types import TASKS_WITH_LABELS, Row, Sequences, join_sequences

_WINDOW_ROWS = 20_000


def file_identity(path: Path) -> str:
    """Name and SHA-256 of a file."""
    digest = hashlib.sha256()
    with explained_os_errors(path, "read"), open_file(path) as handle:
        while block := handle.read(2**20):
            digest.update(block)
    return f"{path.name}:{digest.hexdigest()}"


def labels_of(path: Path, task: TaskName, settings: TaskSettings) -> tuple[str, ...]:
    """The names of all labels of a file of rows (or those that `task.labels` names); () for a task without any."""
    names = find_labels(read_rows(path, task, settings, labelled=True), task, settings.labels)
    if task in TASKS_WITH_LABELS and len(names) < 2:
        problem = f"only the label {names[0]!r}" if names else "no label"
        raise InputError(f"{path}: has {problem}; a task needs at least two")
    return names


def tokenized_file(
    path: Path,
    task: TaskName,
    settings: TaskSettings,
    tokenizer: RowTokenizer,
    labels: tuple[str, ...],
    max_sequence_length: int,
    say: Callable[[str], None] | None = None,
) -> tuple[Sequences, tuple[Row, ...]]:
    """All sequences of a file of labelled rows, and the rows themselves; `say` gets a line on what is read."""
    labelled = not task.endswith("-language-modelling")
    parts, counts, all_rows = [], [], []
    for rows in windows(read_rows(path, task, settings, labelled=labelled, say=say), _WINDOW_ROWS):
        parts.append(
            tokenize_rows(
                rows,
                tokenizer,
                task=task,
                settings=settings,
                max_sequence_length=max_sequence_length,
                labels=labels,
                file=path,
                length_key="finetune.max_sequence_length",
            )
        )
        counts.append(len(rows))
        all_rows += rows
    if not parts:
        raise InputError(f"{path}: holds no rows; give a file with at least one")
    return join_sequences(parts, counts), tuple(all_rows)


def make_built_in_rows(training: Path, held_out: Path, *, reporter: Reporter, overwrite: bool = False) -> None:
    """Write the rows that `python-docstrings` stands for, `{"text": ..., "label": ...}`, where they do not exist yet.

    They are a function of the Python that runs. Several processes may call this at the same time: one writes, the others
    wait for it.

    Args:
        training, held_out: `train.jsonl` and `evaluation.jsonl` of one folder.
        reporter, overwrite: as everywhere.
    """
    folder, (name,) = held_out.parent, BUILT_IN_ROWS
    signature = Signature("rows", {"labels": LABELS, "held_out_of": HELD_OUT_OF}, {name: platform.python_version()})
    with exclusive_lock(folder, str(folder), wait=True):
        if begin_artefact(folder, held_out, signature, overwrite):
            return
        rows = labelled_docstrings(python_texts(name))
        write_text(training, _json_lines(row for row in rows if not row.held_out))
        write_text(held_out, _json_lines(row for row in rows if row.held_out))
    held_out_rows = sum(row.held_out for row in rows)
    reporter.say(f"{folder}: {len(rows) - held_out_rows:,} docstrings of {LABELS} packages, and {held_out_rows:,} held out")


def _json_lines(rows: Iterable[LabelledText]) -> str:
    return "".join(json.dumps({"text": row.text, "label": row.label}, ensure_ascii=False) + "\n" for row in rows)
