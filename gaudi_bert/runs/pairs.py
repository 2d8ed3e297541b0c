"""The job that fine-tunes a model for a task with a single loss over all rows of an update.

Such tasks train on pairs of texts, or on lists of documents. The loss compares all texts of an update with each other.

In addition to the features of the encoder, a batch contains `text_numbers` [B, S]: the number of each sequence among the
sequences of its update, or -1 for an unused slot. With these numbers, the outputs of all micro-batches and processes are
collected in one array.

Letters in shapes: B packs of a batch, S depth, N sequences of an update, C values of an output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.common.arrays import BatchArrays, FloatArray
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.common.progress import format_count
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import FineTuneSettings, TaskSettings
from gaudi_bert.engines.protocol import Communicator, UpdateLoss
from gaudi_bert.rows.packs import PackedSequences
from gaudi_bert.rows.types import Sequences, TupleRow
from gaudi_bert.runs.labelled_data import LabelledData
from gaudi_bert.runs.rows import FineTuneJob, make_run_settings
from gaudi_bert.tasks.contrast import RowGroups
from gaudi_bert.tasks.retrieval import CORRELATIONS
from gaudi_bert.tasks.task import TaskObjective
from gaudi_bert.tasks.task_data import TaskData
from gaudi_bert.tasks.update_plan import RowStream, UpdateShape, choose_update_shape
from gaudi_bert.training.batches import Batch
from gaudi_bert.training.run import PlannedUpdates
from gaudi_bert.training.run_plan import RunPlan


@dataclass(frozen=True, eq=False)
class PairUpdates:
    """Packs texts into micro-batches, for tasks with a loss that compares many rows. The compared rows belong to one update
    of the weights, and each row consists of several texts.

    The shape of the batches was chosen before the run from the first updates. If a later update requires more packs, it has
    more micro-batches of the same shape.

    Attributes:
        sequences: The tokenized texts.
        rows: The rows, which refer to sequences.
        stream: The rows of each update.
        shape: The number and the shape of the micro-batches of an update.
    """

    sequences: Sequences
    rows: RowGroups
    stream: RowStream
    shape: UpdateShape

    def count_micro_batches(self, update: int) -> int:
        """Return how many micro-batches each process computes in a weight update. Updates are numbered from 0."""
        if update >= self.stream.update_count:
            return self.shape.micro_batches
        packs = len(_pack_texts_of_update(self, update))
        return max(self.shape.micro_batches, -(-packs // (self.shape.batch.packs * self.shape.processes)))

    def compute_sequence_capacity(self, update: int) -> int:
        """Return how many sequences fit into the micro-batches of a weight update. Updates are numbered from 0."""
        return self.count_micro_batches(update) * self.shape.batch.packs * self.shape.processes * self.shape.batch.depth

    def iterate_micro_batches(self, first_update: int, rank: int) -> Iterator[Batch]:
        """Yield the micro-batches of one process, update by update and without end. After the last update, yield empty
        micro-batches.

        Args:
            first_update: The update at which to begin, counted from 0.
            rank: The number of the process.
        """
        shape, batch_packs = self.shape, self.shape.batch.packs
        for update in itertools.count(first_update):
            packs = _pack_texts_of_update(self, update)
            packed, sequences = PackedSequences(self.sequences, packs), np.sort(packs.members)
            for number in range(self.count_micro_batches(update)):
                chosen = rank + shape.processes * (number * batch_packs + np.arange(batch_packs))
                batch = packed.build_batch(chosen[chosen < len(packs)], shape.batch)
                text_numbers = np.searchsorted(sequences, batch.members).astype(np.int32)
                yield {**batch.features(), "text_numbers": batch.scatter_sequence_values(text_numbers, -1)}


@lru_cache(maxsize=4)
def _pack_texts_of_update(data: PairUpdates, update: int) -> SampledPacks:
    """Pack the texts of one weight update into rows, and return the packs. Updates are numbered from 0.

    The last few results are cached.
    """
    return data.stream.pack_update(update, data.shape.batch)


@dataclass(frozen=True, kw_only=True)
class PairObjective(TaskObjective):
    """The training objective for a task with a single loss that compares all rows of a weight update."""

    data: PairUpdates

    def compute_loss_denominators(self, batch: BatchArrays) -> FloatArray:
        """Return ones as divisors, because the loss of a weight update is already the mean over its rows."""
        return np.ones(2)

    def make_update_loss(self, micro_batches: Sequence[BatchArrays], update: int, communicator: Communicator) -> UpdateLoss:
        """Return a function that computes the loss of a weight update from the model outputs for all its micro-batches.

        The function collects the outputs of all processes.
        """
        stream, numbers = self.data.stream, [batch["text_numbers"] for batch in micro_batches]
        sequences = stream.find_distinct_sequences(update - 1, update)[0]
        rows = stream.select_update_rows(update - 1, update)

        def loss_of_outputs(outputs: Sequence[NDArray[Any]]) -> tuple[FloatArray, list[FloatArray]]:
            """Collect the model outputs of all processes. Return the summed losses and metrics, and the gradients of the
            loss with respect to this process's outputs.
            """
            together_NC = np.zeros((self.data.compute_sequence_capacity(update - 1), outputs[0].shape[-1]))
            for numbers_BS, output_BSC in zip(numbers, outputs, strict=True):
                together_NC[numbers_BS[numbers_BS >= 0]] = output_BSC[numbers_BS >= 0]
            together_NC = communicator.sum_array(together_NC)[: len(sequences)]
            result = self.data.rows.loss(together_NC, sequences, rows)
            gradients = [np.where(each[..., np.newaxis] >= 0, result.gradient_NH[each], 0.0) for each in numbers]
            sums = np.array([result.loss * len(rows), len(rows), result.right], np.float64)
            return sums * communicator.is_first, gradients

        return loss_of_outputs


# --- The job
#
# For these tasks, `finetune.batch_sequences` is the number of rows in an update. The model is also evaluated before the
# training, which gives the baseline.


class PairJob(FineTuneJob):
    """A fine-tuning job for a task with a single loss that compares all rows of a weight update.

    Args:
        section: The settings of the section `finetune`.
        labelled: The rows, the tokenizer and the model. The training rows are not packed yet.
        out: The folder of the run.

    Raises:
        InputError: A setting does not apply to such tasks, or the rows do not suit the loss.
    """

    evaluates_first = True

    def __init__(self, section: FineTuneSettings, labelled: LabelledData, out: Path) -> None:
        super().__init__(section, replace(labelled, best_metric=_choose_best_metric(section, labelled)), out)
        self._rows = _group_and_check_rows(section, labelled)
        self._stream = RowStream(
            labelled.data.sequences.lengths, self._rows.groups, section.batch_sequences, section.epochs, section.seed
        )

    def plan_weight_updates(self, processes: int, initial_processes: int) -> PlannedUpdates:
        """Choose the number and the shape of the micro-batches in a weight update. See `Job.plan_weight_updates`."""
        section, stream, labelled = self.section, self._stream, self._labelled
        shape = choose_update_shape(
            stream,
            max_micro_batch_packs=section.micro_batch_packs,
            processes=processes,
            hidden_size=labelled.start.sizes.hidden_size,
            longest=labelled.start.sizes.positions,
            depth=section.depth if "depth" in section.model_fields_set and isinstance(section.depth, int) else None,
        )
        pairs = PairUpdates(labelled.data.sequences, self._rows, stream, shape)
        updates_per_epoch = -(-len(stream.rows) // stream.batch_rows)
        plan = RunPlan(
            make_run_settings(section, shape.batch.packs, stream.update_count, updates_per_epoch),
            stream.batch_rows / shape.pack_count,
            processes=processes,
            slots_per_pack=shape.batch.length,
            packs=None,
            count_micro_batches=lambda update: pairs.count_micro_batches(update - 1),
        )
        texts, packs = len(stream.rows.members), updates_per_epoch * shape.pack_count
        return PlannedUpdates(
            plan,
            PairObjective(task=labelled.task, has_answers=self._rows.has_answers, data=pairs),
            lambda order: pairs.iterate_micro_batches(order.updates_done, order.rank),
            self._format_run_description(plan, shape),
            {
                "max_sequence_length": labelled.max_sequence_length,
                "sequences": texts,
                "packs": packs,
                # Without any padding, this many packs would hold all tokens of an epoch.
                "lower_bound": -(-stream.count_tokens_of_distinct_sequences(updates_per_epoch) // shape.batch.length),
                "packing_factor": texts / packs,
                "depth": shape.batch.depth,
                "algorithm": "lpfhp",
            },
        )

    def _format_run_description(self, plan: RunPlan, shape: UpdateShape) -> list[str]:
        """Return lines for the user that describe the data, the model and the updates."""
        stream, labelled = self._stream, self._labelled
        batch, micro_batches, processes = shape
        tokens = stream.row_token_counts.sum() / len(stream.rows)
        complete = max(1, min(stream.updates_examined_for_shape, stream.epochs * len(stream.rows) // stream.batch_rows))
        padding = 1 - stream.count_tokens_of_distinct_sequences(complete) / (complete * shape.pack_count * batch.length)
        return [
            f"{labelled.task.name}: {len(stream.rows):,} rows of {labelled.data.path}, {len(stream.lengths):,} distinct "
            f"texts, {tokens:.1f} tokens per row on average",
            self._format_model(),
            f"an update is {stream.batch_rows:,} rows in {micro_batches} x {batch.packs} packs of {batch.length} positions"
            + (f" on each of {processes} processes" if processes > 1 else "")
            + f", at most {batch.depth} texts in a pack, {padding:.1%} padding",
            f"{stream.update_count:,} updates are {format_count(stream.epochs, 'epoch')}; {plan.settings.warmup_updates:,} "
            f"of them are warm-up; {self.section.optimizer}, learning rate {self.section.learning_rate:g}",
            *filter(None, [labelled.task.describe_unusual_data(labelled.data.rows)]),
        ]


def check_no_packing_settings(settings: PipelineSettings) -> None:
    """Raise an error if the user has set how to pack the rows, although the task always packs by best fit.

    These are the tasks whose loss compares all rows of a weight update.

    Raises:
        InputError: `finetune.row_lengths` or `finetune.algorithm` is set.
    """
    section = settings.finetune
    for key in ("row_lengths", "algorithm"):
        value = getattr(section, key)
        if key in section.model_fields_set and value is not None:
            raise InputError(
                f"finetune.{key} = {value}: the setting is not supported for {settings.task.name} with a loss that "
                "compares all rows of an update; remove the setting"
            )


def _choose_best_metric(section: FineTuneSettings, labelled: LabelledData) -> str:
    """Check that the rows suit the settings of the task, and return the metric that selects the best checkpoint.

    Raises:
        InputError: The rows do not suit the settings of the task, or have no such metric.
    """
    first = labelled.data.rows[0]
    if not isinstance(first, TupleRow):  # a row is a query with its documents
        return labelled.best_metric
    _check_pair_scores(first, labelled.data, labelled.held_out, labelled.task.settings)
    if (first.score is not None) == (labelled.best_metric in CORRELATIONS):
        return labelled.best_metric
    if section.best_metric is not None:
        raise InputError(
            f"finetune.best_metric = {section.best_metric}: the metric does not apply, because each row of "
            f"{labelled.data.path} {_describe_row_kind(first)}; remove the setting"
        )
    return "spearman"


def _group_and_check_rows(section: FineTuneSettings, labelled: LabelledData) -> RowGroups:
    """Return the training rows as groups of texts, and check that an update contains enough rows for comparisons.

    Raises:
        InputError: A setting does not suit the rows or the model, or there are too few rows.
    """
    task, data, held_out = labelled.task, labelled.data, labelled.held_out
    largest, width = max(task.settings.dimensions, default=0), labelled.start.sizes.hidden_size
    if largest > width:
        raise InputError(f"task.dimensions: {largest} is larger than the size {width} of the vectors; list smaller numbers")
    rows = cast(RowGroups, task.group_rows_for_loss(data.sequences, data.rows))
    if held_out is not None and task.name == "reranking":
        try:
            task.group_rows_for_loss(held_out.sequences, held_out.rows)
        except InputError as error:
            raise InputError(f"{held_out.path}: {error}") from error
    compares_rows = task.name == "embedding" and task.settings.loss != "cosine"
    if section.batch_sequences == 1 and compares_rows and len(rows.groups.members) == 2 * len(rows.groups):
        raise InputError(
            "finetune.batch_sequences = 1: an update must contain at least two pairs, because pairs are compared with each "
            "other; set it to 2 or more"
        )
    if len(rows.groups) < section.batch_sequences:
        raise InputError(
            f"{data.path}: the file contains {format_count(len(rows.groups), 'row')}, but an update needs "
            f"finetune.batch_sequences = {section.batch_sequences} rows; set a smaller number"
        )
    return rows


def _check_pair_scores(first_row: TupleRow, data: TaskData, held_out: TaskData | None, settings: TaskSettings) -> None:
    """Check that either all rows have a score or none has, and that the scores and the settings suit the loss.

    Raises:
        InputError: Some rows have a score and others do not, a score is not a possible cosine, all scores are equal, or a
            setting does not apply to these rows.
    """
    for file in filter(None, (data, held_out)):
        for row in cast(Sequence[TupleRow], file.rows):
            if (row.score is None) != (first_row.score is None):
                raise InputError(
                    f"{file.path}: {row.position}: the row {_describe_row_kind(row)}, but the first row of {data.path} "
                    f"{_describe_row_kind(first_row)}; pass rows of one kind"
                )
            if settings.loss == "cosine" and row.score is not None and not -1 <= row.score <= 1 and file is data:
                raise InputError(
                    f"{data.path}: {row.position}: the score must be between -1 and 1 for task.loss = cosine, but is "
                    f"{short_repr(row.score)}; correct the score"
                )
    if first_row.score is None and settings.loss is not None:
        raise InputError(
            f"task.loss = {settings.loss}: the loss requires pairs with a score, but {data.path} has no scores; remove the "
            "setting"
        )
    if first_row.score is not None and settings.symmetric:
        raise InputError(
            f"task.symmetric: the setting applies only to anchors and positives, but {data.path} has pairs with a score; "
            "remove it"
        )
    if settings.loss == "cosine" and "scale" in settings.model_fields_set:
        raise InputError(
            f"task.scale = {settings.scale:g}: the scale has no effect with task.loss = cosine; remove the setting"
        )
    scores = {row.score for row in cast(Sequence[TupleRow], data.rows)}
    if first_row.score is not None and settings.loss != "cosine" and len(scores) == 1:
        raise InputError(
            f"{data.path}: every score is {first_row.score:g}, but the CoSENT loss compares different scores; pass rows "
            "with different scores, or set task.loss = cosine to train on the scores themselves"
        )


def _describe_row_kind(row: TupleRow) -> str:
    """Describe the contents of a row for an error message, for example "has two texts and a score"."""
    return "has an anchor and a positive" if row.score is None else "has two texts and a score"
