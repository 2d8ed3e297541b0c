"""Reading files of labelled rows as token sequences, and packing the sequences into batches.

Every epoch contains every sequence once, and sequences share packs with different sequences in each epoch. The packing is
planned once: it states how many packs contain which lengths. Which sequences share a pack, and the order of the packs, are
permutations seeded by (seed, epoch). For each row length, packs are numbered consecutively through all epochs, so no pack is
dropped at the end of an epoch. After the last pack, empty packs complete the last update.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

import numpy as np

from gaudi_bert.artefacts.completion import Signature, begin_artefact_unless_finished, check_output_path
from gaudi_bert.common.arrays import Float32Array, FloatArray, IntArray, draw_random_uint64
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.features import BUILT_IN_ROWS
from gaudi_bert.common.files import exclusive_lock, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import TaskName, TaskSettings
from gaudi_bert.corpus.documents import convert_texts_to_documents
from gaudi_bert.corpus.python_texts import (
    HELD_OUT_OF,
    LABELS,
    load_python_texts,
    make_labelled_docstring_rows,
    make_titled_docstring_rows,
)
from gaudi_bert.model.heads import TaskHead
from gaudi_bert.packing.strategies import Packing
from gaudi_bert.reading.global_order import pack_numbers_of_rank
from gaudi_bert.rows.fields import collect_label_names
from gaudi_bert.rows.packs import BatchShape, PackedSequences, fill_planned_packs
from gaudi_bert.rows.predictions import TagScheme
from gaudi_bert.rows.reading import SkippedRows, read_rows, split_into_windows
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.tokenizing import tokenize_readable_rows, tokenize_rows
from gaudi_bert.rows.types import LANGUAGE_MODELLING, TASKS_WITH_LABELS, Row, Sequences, concatenate_sequences
from gaudi_bert.tasks.retrieval import collect_distinct_texts
from gaudi_bert.tasks.task import EVALUATION_EPOCH, MaskKey, Task
from gaudi_bert.training.batches import Batch, TrainingOrder
from gaudi_bert.training.evaluate import EvaluationBatch, EvaluationSet
from gaudi_bert.training.model_files import SentenceSettings
from gaudi_bert.training.run_plan import RowPacks, RunPlan

_WINDOW_ROWS = 20_000


def read_task_labels(path: Path, task: TaskName, settings: TaskSettings) -> tuple[str, ...]:
    """Return the label names of a task. They are read from the file that the setting `task.labels` names, or from the rows
    of `path`.

    The result is empty for a task without labels.

    Args:
        path: The file of the rows.
        task: The task.
        settings: The settings of the task.

    Raises:
        InputError: There are fewer than two labels, or the tags mix chunk tags with other tags.
    """
    names = collect_label_names(read_rows(path, task, settings, labelled=True), task, settings.labels)
    if task in TASKS_WITH_LABELS and len(names) < 2:
        problem = f"only the label {names[0]!r}" if names else "no label"
        raise InputError(f"{path}: the file contains {problem}, but at least two labels are required; correct the file")
    odd = TagScheme(names).odd_tag if task == "token-classification" else None
    if odd is not None:
        raise InputError(
            f"{path}: the tag {shorten(odd)!r} does not match the other tags; use a prefix such as B- or I- in all tags"
            " except O, or in none"
        )
    return names


def tokenize_file(
    path: Path,
    task: TaskName,
    settings: TaskSettings,
    tokenizer: RowTokenizer,
    labels: tuple[str, ...],
    max_sequence_length: int,
    say: Callable[[str], None] | None = None,
    skipped: SkippedRows | None = None,
) -> tuple[Sequences, tuple[Row, ...]]:
    """Read and tokenize a file of labelled rows, and return the sequences and the rows.

    Args:
        path: The file.
        task: The task.
        settings: The settings of the task.
        tokenizer: The tokenizer.
        labels: The names of the labels by number.
        max_sequence_length: The largest number of tokens in a sequence.
        say: Called once with a line about what is read.
        skipped: Counts the rows that are skipped because they cannot be read or are too long.

    Returns:
        All sequences, and the rows. For embeddings, each distinct text is one sequence.

    Raises:
        InputError: The file contains no rows, or a row is invalid and must not be skipped.
    """

    skipped = skipped or SkippedRows()
    read = read_rows(path, task, settings, labelled=task not in LANGUAGE_MODELLING, say=say, skipped=skipped)
    is_embedding, all_rows = task == "embedding", []
    if is_embedding:  # for embeddings, each distinct text is one sequence
        all_rows = list(read)
        read = iter(collect_distinct_texts(settings, all_rows).texts if all_rows else ())
    tokenize = partial(
        tokenize_rows,
        tokenizer=tokenizer,
        task=None if is_embedding else task,
        settings=settings,
        max_sequence_length=max_sequence_length,
        labels=labels,
        file=path,
        length_key="finetune.max_sequence_length",
    )
    parts, counts = [], []
    for window in split_into_windows(read, _WINDOW_ROWS):
        rows, sequences, problems = tokenize_readable_rows(window, "stop" if is_embedding else settings.on_bad_row, tokenize)
        for problem in problems.values():
            skipped.add(problem)
        if sequences is not None:
            parts.append(sequences)
            counts.append(len(rows))
            all_rows += () if is_embedding else rows
    if not parts:
        raise InputError(f"{path}: the file contains no rows; pass a file with at least one row")
    return concatenate_sequences(parts, counts), tuple(all_rows)


def write_built_in_dataset(
    training_file: Path, held_out_file: Path, task: TaskName | None = None, *, reporter: Reporter, overwrite: bool = False
) -> None:
    """Write the training rows and the held-out rows of the built-in data `python-docstrings`, unless the files already
    exist.

    For embeddings, the rows are `{"anchor": first line, "positive": the rest}`, and otherwise `{"text": ..., "label":
    package}`. They depend only on the version of Python. If several processes call this at the same time, one of them writes
    the files and the others wait.

    Args:
        training_file: The file of the training rows.
        held_out_file: The file of the held-out rows, in the same folder.
        task: The task.
        reporter: Reports what was written.
        overwrite: Whether files of other settings are replaced.
    """
    folder, (name,) = held_out_file.parent, BUILT_IN_ROWS
    pairs = task == "embedding"
    settings = {"held_out_of": HELD_OUT_OF, **({"task": task} if pairs else {"labels": LABELS})}
    signature = Signature("rows", settings, {name: platform.python_version()})
    check_output_path(folder, held_out_file, signature.stage, overwrite)
    with exclusive_lock(folder, str(folder), wait=True):
        if begin_artefact_unless_finished(folder, held_out_file, signature, overwrite):
            return
        texts = load_python_texts(name)
        rows = (
            make_titled_docstring_rows(texts) if pairs else make_labelled_docstring_rows(convert_texts_to_documents(texts))
        )
        for path, is_held_out in ((training_file, False), (held_out_file, True)):
            chosen = (row for row, out in rows if out == is_held_out)
            write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen))
    held_out_rows = sum(out for _, out in rows)
    what = "docstrings with their first lines" if pairs else f"docstrings of {LABELS} packages"
    reporter.say(f"{folder}: {len(rows) - held_out_rows:,} {what}, and {held_out_rows:,} held out")


# --- packs of the sequences


@dataclass(frozen=True)
class TaskData:
    """The tokenized sequences of a file of rows, and how they are packed for each row length.

    Attributes:
        path: The file of the rows.
        identity: Identifies the data.
        rows: The rows that the sequences come from. Empty if the task needs no rows for its metrics.
        sequences: The sequences.
        packings: One packing per row length, ascending. Each sequence belongs to the shortest row length that holds it.
    """

    path: Path
    identity: str
    rows: tuple[Row, ...] = field(repr=False)
    sequences: Sequences = field(repr=False)
    packings: tuple[Packing, ...] = field(repr=False)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The row lengths, ascending."""
        return tuple(packing.histogram.max_sequence_length for packing in self.packings)

    @property
    def packs_by_row_length(self) -> tuple[RowPacks, ...]:
        """Each row length and the number of packs with this length, in the form that `RunPlan` requires. Empty if all packs
        have the same row length.
        """
        if len(self.packings) == 1:
            return ()
        return tuple(RowPacks(packing.histogram.max_sequence_length, packing.packs) for packing in self.packings)

    @property
    def packs(self) -> int:
        """The total number of packs of all row lengths."""
        return sum(packing.packs for packing in self.packings)

    @property
    def packing_factor(self) -> float:
        """The mean number of sequences in a pack."""
        return len(self.sequences) / self.packs

    def batch_shape(self, length_index: int, batch_packs: int) -> BatchShape:
        """Return the static shape of a batch of `batch_packs` packs with the row length `row_lengths[length_index]`."""
        return BatchShape(batch_packs, self.row_lengths[length_index], self.packings[length_index].depth_used)

    def pack_epoch(self, seed: int, epoch: int, length_index: int) -> PackedSequences:
        """Return the packs of one row length in one epoch. Sequences share packs with different sequences in each epoch.

        Args:
            seed: The seed of the run.
            epoch: The epoch.
            length_index: The index of the row length in `row_lengths`.
        """
        epoch_seed = int(draw_random_uint64(1, seed, "task epoch", epoch + 1)[0])
        lengths = self.sequences.lengths
        members = np.flatnonzero(np.searchsorted(self.row_lengths, lengths) == length_index)
        packs = fill_planned_packs(members, lengths, self.packings[length_index].strategy_counts, epoch_seed)
        return PackedSequences(self.sequences, packs)


def iterate_training_batches(
    data: TaskData, task: Task, plan: RunPlan, epochs: int, order: TrainingOrder
) -> Iterator[Batch]:
    """Yield the training batches of one process. After the last epoch, yield endless batches of empty packs.

    Args:
        data: The sequences and their packings.
        task: The task, which adds the targets.
        plan: The batch sizes of the run.
        epochs: The number of epochs.
        order: The seed, the process and the position from which the run continues.
    """
    pack_epoch = lru_cache(maxsize=2 * len(data.packings))(partial(data.pack_epoch, order.seed))

    def features_and_targets(length_index: int, epoch: int, pack_numbers: IntArray, shape: BatchShape) -> Batch:
        """Return the features and targets of a batch of packs that have the same row length and epoch."""
        batch = pack_epoch(epoch, length_index).build_batch(pack_numbers, shape)
        return {**batch.features(), **cast(Batch, task.make_targets_and_weights(batch, MaskKey(order.seed, epoch)))}

    for length_index, begin, end, batch_packs in plan.iterate_micro_batches(order.updates_done, order.packs_done):
        epoch_packs, shape = data.packings[length_index].packs, data.batch_shape(length_index, batch_packs)
        packs = pack_numbers_of_rank(begin, min(end, epochs * epoch_packs), order.rank, order.size)
        epoch_of_pack, numbers = np.divmod(packs, epoch_packs)
        first, *later = np.unique(epoch_of_pack).tolist() or [0]
        batch = features_and_targets(length_index, first, numbers[epoch_of_pack == first], shape)
        for epoch in later:  # the packs of the next epochs follow in the same batch
            rows = np.flatnonzero(epoch_of_pack == epoch)
            for name, values in features_and_targets(length_index, epoch, numbers[rows], shape).items():
                batch[name][rows] = values[: len(rows)]
        yield batch


# --- evaluation: every sequence once, with the same metrics for packed and unpacked sequences and any number of processes


@dataclass(frozen=True)
class TaskResult:
    """The metrics of an evaluation, and the model outputs that they were computed from.

    Attributes:
        figures: The metrics by name.
        best_metric: The metric that selects the best checkpoint.
        sequences: The number of sequences. Each window of a long row counts.
        rows: The number of rows.
        logits: [N, C] or [T, C], in the order of the data. None for a task without predictions.
    """

    figures: Mapping[str, float]
    best_metric: str
    sequences: int
    rows: int
    logits: Float32Array | None = field(repr=False)

    @property
    def accuracy(self) -> float:
        """The value of the metric that selects the best checkpoint."""
        return self.figures[self.best_metric]

    def as_json(self) -> dict[str, float]:
        """Return the metrics by name, as in `metrics.json` and `metrics.jsonl`."""
        return {**self.figures, "evaluated_rows": self.rows, "evaluated_sequences": self.sequences}

    def format_line(self) -> str:
        """Return the metrics as one line for the user."""
        figures = ", ".join(f"{name} {value:.4f}" for name, value in self.figures.items())
        return f"{figures}; over {self.rows:,} rows"


@dataclass(frozen=True)
class TaskEvaluation(EvaluationSet[TaskResult]):
    """Evaluates the model of a task on labelled rows.

    Attributes:
        task: The task.
        data: The sequences and their packings.
        batch_packs: The number of packs in a batch, for the longest rows.
        seed: The seed of the masks, if the task draws masks.
        best_metric: The metric that selects the best checkpoint.
        hidden_size: The number of values in an embedding.
        folder: The settings of the model folder, which may truncate embeddings.
    """

    task: Task
    data: TaskData
    batch_packs: int
    seed: int
    best_metric: str
    hidden_size: int = 0
    folder: SentenceSettings = field(default_factory=SentenceSettings)

    @property
    def metric_sum_count(self) -> int:
        """The number of values that the head of a task sums over each batch, such as the loss."""
        return 3

    def count_labels(self, batch: Batch) -> FloatArray:
        """Return the sums that this batch adds to those of the model's head: three zeros if the head of the task is a
        `VectorHead`, which sums nothing, and otherwise an empty array. A `TaskHead` itself returns all `sum_count` sums.
        """
        return np.zeros(0 if isinstance(self.task.head, TaskHead) else 3)

    def read_batches(self, rank: int, world_size: int) -> Iterator[EvaluationBatch]:
        """Yield the evaluation batches of one process, grouped by row length. All processes together yield every pack once.

        The last batch of each length is filled up with empty packs.

        Args:
            rank: The number of the process.
            world_size: The number of processes.

        Yields:
            The features with targets, and the function that copies the outputs to their places among all outputs.
        """
        data, mask_key = self.data, MaskKey(self.seed, EVALUATION_EPOCH)
        for length_index, packing in enumerate(data.packings):
            max_packs = self.batch_packs * data.row_lengths[-1] // data.row_lengths[length_index]
            shape = data.batch_shape(length_index, min(max_packs, packing.packs))
            packed = data.pack_epoch(self.seed, EVALUATION_EPOCH, length_index)
            for batch in packed.batches(shape, rank=rank, processes=world_size):
                targets = cast(Batch, self.task.make_targets_and_weights(batch, mask_key))
                scatter = partial(batch.scatter_outputs, per_token=self.task.head.predicts_per_token)
                yield {**batch.features(), **targets}, scatter

    def allocate_outputs(self) -> Float32Array | None:
        """Return an array of zeros for the outputs of all sequences, which are logits [N, C] or [T, C] or embeddings [N, H].

        Return None if the outputs are not needed.
        """
        head, sequences = self.task.head, self.data.sequences
        count = len(sequences.input_ids) if head.predicts_per_token else len(sequences)
        width = self.task.output_width if isinstance(head, TaskHead) else self.hidden_size
        return np.zeros((count, width), np.float32) if head.metrics_need_outputs else None

    def compute_metrics(self, totals: FloatArray, outputs: Float32Array | None) -> TaskResult:
        """Return the loss and the metrics of the task, computed from the sums and the model outputs of all batches."""
        loss, weight, right = totals
        sequences, rows = self.data.sequences, self.data.rows
        figures = {"loss": loss / max(weight, 1.0)} if isinstance(self.task.head, TaskHead) else {}
        if outputs is not None:
            outputs = self.folder.truncate_vectors(outputs)
            figures.update(self.task.compute_metrics(outputs, sequences, rows))
        else:
            figures.update(accuracy=right / max(weight, 1.0), perplexity=math.exp(min(figures["loss"], 700.0)))
        figures = {name: float(value) for name, value in figures.items()}
        return TaskResult(figures, self.best_metric, len(sequences), len(rows), outputs)
