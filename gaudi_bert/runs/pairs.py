"""The job that fine-tunes a model for a task with one loss over all rows of an update.

Such tasks learn from pairs of texts, or from lists of documents, by comparing all texts of an update with each other.

In addition to the features of the encoder, a batch contains `text_numbers` [B, S]: the number of each sequence among the
sequences of its update, or -1 for an unused slot. These numbers are used to collect the outputs of all micro-batches and
processes in one array.

Letters in shapes: B packs of a batch, S depth, N sequences of an update, C values of an output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gaudi_bert.artefacts.training import BestCheckpoint
from gaudi_bert.common.arrays import BatchArrays, FloatArray
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.engines.protocol import Communicator, ModelSpec, UpdateLoss
from gaudi_bert.rows.packs import PackedSequences
from gaudi_bert.rows.types import Sequences, TupleRow
from gaudi_bert.runs.rows import BASELINE_NAME, FineTuneJob, run_settings
from gaudi_bert.tasks.contrast import PairedRows
from gaudi_bert.tasks.kinds.retrieval import CORRELATIONS
from gaudi_bert.tasks.kinds.task import TaskObjective
from gaudi_bert.tasks.task_data import TaskData
from gaudi_bert.tasks.task_models import sees_only_before
from gaudi_bert.tasks.update_plan import RowStream, UpdateShape, choose_shape
from gaudi_bert.training.input import Batch
from gaudi_bert.training.model_files import SentenceFolder, read_sentence_folder
from gaudi_bert.training.run import Prepared
from gaudi_bert.training.run_plan import RunPlan


@dataclass(frozen=True, eq=False)
class _PairData:
    """Tokenized rows, the order in which they are read, and the shape of the updates.

    The shape was chosen before the run from the first updates. If a later update needs more packs, it has more micro-batches
    of the same shape.

    Attributes:
        sequences: The tokenized texts.
        rows: The rows, which refer to sequences.
        stream: The rows of each update.
        shape: The number and the shape of the micro-batches of an update.
    """

    sequences: Sequences
    rows: PairedRows
    stream: RowStream
    shape: UpdateShape

    def micro_batches_of(self, update: int) -> int:
        """Return the number of micro-batches on one process in update `update`, counted from 0."""
        if update >= self.stream.updates:
            return self.shape.micro_batches
        packs = len(_pack_update(self, update))
        return max(self.shape.micro_batches, -(-packs // (self.shape.batch.packs * self.shape.processes)))

    def most_sequences(self, update: int) -> int:
        """Return an upper bound of the number of sequences in update `update`, counted from 0."""
        return self.micro_batches_of(update) * self.shape.batch.packs * self.shape.processes * self.shape.batch.depth

    def batches(self, first_update: int, rank: int) -> Iterator[Batch]:
        """Yield the micro-batches of one process, without end. After the last update, they are empty.

        Args:
            first_update: The update at which to begin, counted from 0.
            rank: The number of the process.
        """
        shape, batch_packs = self.shape, self.shape.batch.packs
        for update in itertools.count(first_update):
            packs = _pack_update(self, update)
            packed, sequences = PackedSequences(self.sequences, packs), np.sort(packs.members)
            for number in range(self.micro_batches_of(update)):
                chosen = rank + shape.processes * (number * batch_packs + np.arange(batch_packs))
                batch = packed.lay_out(chosen[chosen < len(packs)], shape.batch)
                text_numbers = np.searchsorted(sequences, batch.members).astype(np.int32)
                yield {**batch.features(), "text_numbers": batch.spread_sequences(text_numbers, -1)}


@lru_cache(maxsize=4)
def _pack_update(data: _PairData, update: int) -> SampledPacks:
    """Return the packs of an update, counted from 0. The last few results are cached."""
    return data.stream.pack_update(update, data.shape.batch)


@dataclass(frozen=True, kw_only=True)
class _PairObjective(TaskObjective):
    """The objective with one loss over all rows of an update, weighted by the number of rows."""

    data: _PairData

    def denominators(self, batch: BatchArrays) -> FloatArray:
        """Return ones, because `update_loss` already divides the loss by the number of rows."""
        return np.ones(2)

    def update_loss(self, micro_batches: Sequence[BatchArrays], update: int, communicator: Communicator) -> UpdateLoss:
        """Return the loss of an update, which first collects the outputs of all sequences from all processes."""
        stream, numbers = self.data.stream, [batch["text_numbers"] for batch in micro_batches]
        sequences = stream.distinct(update - 1, update)[0]
        rows = stream.rows_of(update - 1, update)

        def loss_of_outputs(outputs: Sequence[NDArray[Any]]) -> tuple[FloatArray, list[FloatArray]]:
            """Collect the outputs of all processes, and return the sums and the gradients."""
            together_NC = np.zeros((self.data.most_sequences(update - 1), outputs[0].shape[-1]))
            for numbers_BS, output_BSC in zip(numbers, outputs, strict=True):
                together_NC[numbers_BS[numbers_BS >= 0]] = output_BSC[numbers_BS >= 0]
            together_NC = communicator.sum_array(together_NC)[: len(sequences)]
            result = self.data.rows.loss(together_NC, sequences, rows)
            gradients = [np.where(each[..., np.newaxis] >= 0, result.gradient_NH[each], 0.0) for each in numbers]
            sums = np.array([result.loss * len(rows), len(rows), result.right], np.float64)
            return sums * communicator.is_first, gradients

        return loss_of_outputs


# --- The job. Here, `finetune.batch_sequences` is a number of rows. The model is also evaluated before training, as a
# baseline.


class PairJob(FineTuneJob):
    """The job for tasks with one loss over all rows of an update."""

    evaluates_first, plans_packs = True, False

    def _read_files(self, reporter: Reporter) -> None:
        """Read the rows and the model, and check that the rows can be trained with one loss per update.

        Raises:
            InputError: A setting does not apply to such tasks, or the rows do not suit the loss.
        """
        for key in ("row_lengths", "algorithm"):
            value = getattr(self.section, key)
            if key in self.section.model_fields_set and value is not None:
                raise InputError(
                    f"finetune.{key} = {value}: is not for {self._settings.task.name} with one loss of all rows of an "
                    "update, which has best fit in rows of one length; leave it out"
                )
        super()._read_files(reporter)
        data, held_out, section = self._data, self._held_out, self.section
        first = data.rows[0]
        if isinstance(first, TupleRow):  # otherwise, a row is a query with its documents
            _check_rows(first, data, held_out, self._task.settings)
            if (first.score is not None) != (self._best_metric in CORRELATIONS):
                if section.best_metric is not None:
                    raise InputError(
                        f"finetune.best_metric = {section.best_metric}: {data.path} {_kind(first)}, which has no such "
                        "metric; leave it out"
                    )
                self._best_metric = "spearman"
        most, width = max(self._task.settings.dimensions, default=0), self._start.sizes.hidden_size
        if most > width:
            raise InputError(f"task.dimensions: {most} is more than the {width} values of a vector; name fewer")
        rows = cast(PairedRows, self._task.paired(data.sequences, data.rows))
        if held_out is not None and self._task.name == "reranking":
            try:
                self._task.paired(held_out.sequences, held_out.rows)
            except InputError as error:
                raise InputError(f"{held_out.path}: {error}") from error
        compares = self._task.name != "embedding" or self._task.settings.loss == "cosine"
        if section.batch_sequences == 1 and not compares and len(rows.groups.members) == 2 * len(rows.groups):
            raise InputError(
                "finetune.batch_sequences = 1: an update of one pair has nothing to compare it with; set it to 2 or more"
            )
        if len(rows.groups) < section.batch_sequences:
            raise InputError(
                f"{data.path}: has {format_count(len(rows.groups), 'row')}, fewer than finetune.batch_sequences = "
                f"{section.batch_sequences}, which an update learns together; set it to no more"
            )
        self._rows = rows
        self._stream = RowStream(data.sequences.lengths, rows.groups, section.batch_sequences, section.epochs, section.seed)

    def _task_settings(self) -> TaskSettings:
        """Return the settings of the task. For embeddings, missing pooling and prompts are taken from the model's folder.

        Raises:
            InputError: The pooling or the prompts of the model are not supported.
        """
        settings = self._settings.task
        if settings.name != "embedding":
            return settings
        model = self._files.model
        self._sentences = read_sentence_folder(model, settings.pooling) or SentenceFolder(settings.pooling or "mean")
        own = self._sentences
        changes = {
            "pooling": own.pooling,
            "query_prompt": own.prompts.get("query") if settings.query_prompt is None else settings.query_prompt,
            "document_prompt": own.prompts.get("document") if settings.document_prompt is None else settings.document_prompt,
        }
        if (changes["query_prompt"] or changes["document_prompt"]) and not own.pools_prompt:
            raise InputError(
                f"{model}: leaves prompts out of the mean, which cannot be done here; set task.query_prompt and "
                "task.document_prompt to '' for none"
            )
        if sees_only_before(model) and own.pooling != "last":
            raise InputError(
                f"{model}: a token sees only those before it, so {own.pooling} pooling misses most of a text; set "
                "task.pooling to last"
            )
        return settings.model_copy(update=changes)

    def _prepared(self, processes: int) -> Prepared:
        """Choose the shape of the updates for a number of processes, and return the job ready to be run."""
        section, stream, sizes, task = self.section, self._stream, self._start.sizes, self._task
        shape = choose_shape(
            stream,
            most_packs=section.micro_batch_packs,
            processes=processes,
            hidden_size=sizes.hidden_size,
            longest=sizes.positions,
            depth=section.depth if "depth" in section.model_fields_set and isinstance(section.depth, int) else None,
        )
        self._shape, pairs = shape, _PairData(self._data.sequences, self._rows, stream, shape)
        an_epoch = -(-len(stream.rows) // stream.batch_rows)
        plan = RunPlan(
            run_settings(section, shape.batch.packs, stream.updates, an_epoch),
            stream.batch_rows / shape.packs,
            processes=processes,
            slots_per_pack=shape.batch.length,
            packs=None,
            needed=lambda update: pairs.micro_batches_of(update - 1),
        )
        return Prepared(
            ModelSpec(self._start.config, task.head),
            _PairObjective(task=task, has_answers=self._rows.has_answers, data=pairs),
            plan,
            self._evaluation(),
            lambda _, order: pairs.batches(order.updates_done, order.rank),
            self._lines(plan),
            self._signature(),
        )

    def _lines(self, plan: RunPlan) -> list[str]:
        """Return the lines for the user that describe the data, the model and the updates."""
        stream, start, shape = self._stream, self._start, self._shape
        batch, micro_batches, processes = shape
        tokens = stream.tokens.sum() / len(stream.rows)
        complete = max(1, min(stream.looked_at, stream.epochs * len(stream.rows) // stream.batch_rows))
        padding = 1 - stream.distinct_tokens(complete) / (complete * shape.packs * batch.length)
        return [
            f"{self._task.name}: {len(stream.rows):,} rows of {self._data.path}, {len(stream.lengths):,} distinct texts, "
            f"{tokens:.1f} tokens of a row on average",
            f"{start.path} ({start.kind}): {format_count(start.sizes.layers, 'layer')}, hidden size "
            f"{start.sizes.hidden_size}",
            f"an update is {stream.batch_rows:,} rows in {micro_batches} x {batch.packs} packs of {batch.length} positions"
            + (f" on each of {processes} processes" if processes > 1 else "")
            + f", at most {batch.depth} texts in a pack, {padding:.1%} padding",
            f"{stream.updates:,} updates are {format_count(stream.epochs, 'epoch')}; {plan.settings.warmup_updates:,} of "
            f"them are warm-up; {self.section.optimizer}, learning rate {self.section.learning_rate:g}",
            *filter(None, [self._task.note(self._data.rows)]),
        ]

    def _figures(self) -> dict[str, Any]:
        """Return the packing of an epoch, and the metrics of the model before training.

        `lower_bound` is the number of packs below which the tokens of the updates cannot be packed.
        """
        stream, shape = self._stream, self._shape
        updates = -(-len(stream.rows) // stream.batch_rows)
        texts, packs = len(stream.rows.members), updates * shape.packs
        stored = BestCheckpoint.read_if_present(self._out / BASELINE_NAME)
        metrics = {} if stored is None else stored.metrics
        return {
            "baseline": {name: metrics[name] for name in self._task.metric_names if name in metrics},
            "max_sequence_length": self._length(),
            "sequences": texts,
            "packs": packs,
            "lower_bound": -(-stream.distinct_tokens(updates) // shape.batch.length),
            "packing_factor": texts / packs,
            "depth": shape.batch.depth,
            "algorithm": "lpfhp",
        }


def _check_rows(first: TupleRow, data: TaskData, held_out: TaskData | None, settings: TaskSettings) -> None:
    """Check that all rows are of the same kind, and that the scores and the settings suit the loss.

    Raises:
        InputError: Some rows have a score and others do not, a score is not a possible cosine, all scores are equal, or a
            setting does not apply to these rows.
    """
    for file in filter(None, (data, held_out)):
        for row in cast(Sequence[TupleRow], file.rows):
            if (row.score is None) != (first.score is None):
                raise InputError(
                    f"{file.path}: {row.position}: {_kind(row)}, the first row of {data.path} {_kind(first)}; give rows of "
                    "one kind"
                )
            if settings.loss == "cosine" and row.score is not None and not -1 <= row.score <= 1 and file is data:
                raise InputError(
                    f"{data.path}: {row.position}: the score is {short_repr(row.score)}; a cosine is a number of -1 to 1"
                )
    if first.score is None and settings.loss is not None:
        raise InputError(f"task.loss = {settings.loss}: is for pairs with a score, {data.path} has none; leave it out")
    if first.score is not None and settings.symmetric:
        raise InputError(f"task.symmetric: is for anchors and positives, {data.path} has pairs with a score; leave it out")
    if settings.loss == "cosine" and "scale" in settings.model_fields_set:
        raise InputError(f"task.scale = {settings.scale:g}: a cosine is learnt as it is (task.loss = cosine); leave it out")
    scores = {row.score for row in cast(Sequence[TupleRow], data.rows)}
    if first.score is not None and settings.loss != "cosine" and len(scores) == 1:
        raise InputError(
            f"{data.path}: every score is {first.score:g}, and CoSENT learns which of two pairs is more alike: give others, "
            "or learn the number itself with task.loss = cosine"
        )


def _kind(row: TupleRow) -> str:
    """Describe the kind of a row, for error messages."""
    return "has an anchor and a positive" if row.score is None else "has two texts and a score"
