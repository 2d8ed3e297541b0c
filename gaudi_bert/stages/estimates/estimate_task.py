"""Stage estimate on the rows of a task: what packing gives at each length of a row and each depth, before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gaudi_bert.artefacts.store.mirror import local_copies
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import StoreSettings, TaskSettings
from gaudi_bert.config.tasks import TASK_NAMES

if TYPE_CHECKING:
    from gaudi_bert.common.arrays import IntArray

__all__ = ["TaskEstimate", "TaskEstimateRow", "estimate_task"]

WINDOW_ROWS = 8192


@dataclass(frozen=True)
class TaskEstimateRow:
    """One length of a row at one depth.

    Attributes:
        cut: sequences that are longer and would be cut.
        gap: packs above the proven bound.
    """

    max_sequence_length: int
    depth: int | str
    packs: int
    lower_bound: int
    gap: int
    packing_factor: float
    efficiency: float
    cut: int


@dataclass(frozen=True)
class TaskEstimate:
    """What was found; lengths in tokens, of sequences that nothing cuts."""

    source: str
    task: str
    sequences: int
    mean_length: float
    longest: int
    rows: list[TaskEstimateRow]


def estimate_task(
    data: str,
    model: Path,
    settings: TaskSettings,
    *,
    row_lengths: Sequence[int],
    depths: Sequence[str | int],
    reporter: Reporter,
    store: StoreSettings | None = None,
) -> TaskEstimate:
    """Tokenize the rows, and pack their lengths optimally in many ways; longer sequences count as cut.

    Args:
        data: a file of rows, or its URL in an object store.
        model: a folder with the tokenizer, or its URL.
        settings: of the task, with its name.
        row_lengths: tokens of a row.
        depths: numbers from 1, or "max".
        reporter: where progress goes.
        store: how object stores are reached.

    Raises:
        InputError: the task is not known, or a row is wrong.
    """
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.histogram import Histogram

    if settings.name is None:
        raise InputError(f"task.name is not set; choose one of {', '.join(TASK_NAMES)}")
    with local_copies((data, model), store) as (rows_here, folder):
        lengths = _lengths(str(rows_here), folder or model, settings, reporter)
    rows = []
    jobs = [(length, depth) for length in row_lengths for depth in depths]
    with reporter.task("estimate", len(jobs), "packings") as task:
        for length, depth in jobs:
            counts = np.bincount(np.minimum(lengths, length), minlength=length + 1)[1:]
            packing = pack_histogram(Histogram(length, counts), "optimal", depth)
            rows.append(
                TaskEstimateRow(
                    max_sequence_length=length,
                    depth=depth,
                    packs=packing.packs,
                    lower_bound=packing.lower_bound,
                    gap=packing.packs - packing.lower_bound,
                    packing_factor=len(lengths) / packing.packs,
                    efficiency=packing.histogram.tokens / (packing.packs * length),
                    cut=int((lengths > length).sum()),
                )
            )
            task.advance()
    return TaskEstimate(data, settings.name, len(lengths), float(lengths.mean()), int(lengths.max()), rows)


def _lengths(data: str, model: Path, settings: TaskSettings, reporter: Reporter) -> IntArray:
    """Tokens of each sequence, one a row, uncut."""
    from gaudi_bert.tasks.rows.reading import read_rows, windows
    from gaudi_bert.tasks.rows.tokenizer import open_tokenizer
    from gaudi_bert.tasks.rows.tokenizing import tokenize_rows

    tokenizer = open_tokenizer(model)
    parts: list[IntArray] = []
    for rows in windows(read_rows(data, settings.name, settings), WINDOW_ROWS):
        whole = settings.model_copy(update={"too_long": "error"})
        sequences = tokenize_rows(rows, tokenizer, task=settings.name, settings=whole, max_sequence_length=2**30, file=data)
        parts.append(sequences.lengths)
        if reporter.live:
            reporter.show(f"{sum(map(len, parts)):,} rows")
    if not parts:
        raise InputError(f"{data}: holds no rows; give a file with at least one")
    return np.concatenate(parts)
