"""Stage train on a packed table: train a masked or causal language model, from random or from pretrained weights.

`training/run.py` contains the steps of a run, and describes its folder. At the end, the folder also contains the model in
the format of `transformers` (`config.json`, `model.safetensors` and the tokenizer), so that it can be passed to `finetune
--model`.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, cast

import numpy as np
from typing_extensions import Unpack

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.examples import TokenisedTexts
from gaudi_bert.artefacts.mirrored_folder import download_missing_files, mirror_folder, open_local_copy
from gaudi_bert.artefacts.packed import (
    RowLengthTables,
    TableMetadata,
    detect_pack_format,
    list_format_detection_files,
    row_table_path,
)
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.training import TableTraining, WordEvaluation, WordMetrics
from gaudi_bert.common.arrays import Float32Array, FloatArray, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import format_location, is_in_store
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import find_keys_changeable_on_resume
from gaudi_bert.engines.protocol import ModelSpec
from gaudi_bert.model.config import BertConfig, ModelSizes
from gaudi_bert.model.heads import TaskKind
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.rows.tokenizer import RowTokenizer, has_tokenizer, open_tokenizer
from gaudi_bert.rows.tokenizer_files import TOKENIZER_NAME
from gaudi_bert.tables.packed_files import TableFiles, open_packed_tables
from gaudi_bert.tables.sources import is_table
from gaudi_bert.tasks.language_modelling import WordTargets
from gaudi_bert.tasks.task import EVALUATION_EPOCH, TaskObjective
from gaudi_bert.tasks.task_models import prepare_language_modelling, write_task_folder
from gaudi_bert.training.batches import Batch, TrainingOrder, read_batches_in_order, read_each_pack_once
from gaudi_bert.training.evaluate import EvaluationBatch, EvaluationSet, compute_majority_baseline, count_values
from gaudi_bert.training.loop import TrainingLoop
from gaudi_bert.training.objective import LossDenominators
from gaudi_bert.training.run import Job, PlannedUpdates, RunOptions, run_job
from gaudi_bert.training.run_plan import DryRun, RowPacks, RunPlan, RunSettings, format_plan

_MASKED: TaskKind = "masked-language-modelling"


def is_packed_table(data: Path, store: StoreSettings | None = None) -> bool:
    """Return True if `data` is a packed table, and False if it contains packed or unpacked records.

    Args:
        data: A local path, a glob pattern or a URL.
        store: The settings of the object store.

    Raises:
        InputError: There is no such data, or it is a table that is not packed.
    """
    if not is_in_store(data) and not os.path.lexists(data) and not glob.glob(os.fspath(data)):
        raise InputError(f"{data}: the path does not exist, and no file matches it as a pattern; check the path")
    with mirror_folder(data, store) if is_in_store(data) else nullcontext(data) as folder:
        tokenised = folder / TokenisedTexts.file_name
        if is_in_store(data):
            download_missing_files(*list_format_detection_files(folder), tokenised)
        is_packed = detect_pack_format(folder) == "table" or RowLengthTables.json_path_in(folder).is_file()
        is_tokenised = tokenised.is_file()
    if not is_packed and (is_tokenised or (not is_in_store(data) and is_table(data))):
        name = format_location(data)
        raise InputError(f"{name}: the table is not packed; run `gaudi-bert pack {name} --out packed/` first")
    return is_packed


def train_on_table(
    settings: PipelineSettings,
    data: Path,
    model: str | None,
    evaluation_data: Path | None,
    out: Path,
    **options: Unpack[RunOptions],
) -> StageOutput[TableTraining] | DryRun:
    """Train a masked or causal language model on a packed table, and write it in the format of `transformers`.

    Args:
        settings: The settings of the pipeline.
        data: The packed table, on a disk or in an object store.
        model: A folder with pretrained weights, or a config.json or model type of `transformers` for random weights. None
            for a BERT as the settings describe it.
        evaluation_data: A packed table for evaluations, with the same tokenizer, or None.
        out: The folder of the run.
        **options: See `RunOptions`.

    Returns:
        The result, or the plan for a dry run.

    Raises:
        InputError: The settings, the model and the tables do not fit together.
        StoppedError: A signal requested a stop. A checkpoint has been saved.
        FailedError: The training diverged, or another process was lost.
    """
    training = settings.training
    if training.init_checkpoint is not None:
        raise InputError(
            "training.init_checkpoint: the setting is supported only for packed records; for a packed table, pass the "
            "weights with --model"
        )
    for name, required in (("loss", "token"), ("measure_speedup", False)):
        value = getattr(training, name)
        if value != required:
            raise InputError(
                f"training.{name} = {str(value).lower()}: the value is supported only for packed records; for a packed "
                f"table, set it to {str(required).lower()}"
            )
    with ExitStack() as stack:
        source = open_packed_table(stack.enter_context(open_local_copy(data, settings.store)))
        held_out = None
        if evaluation_data is not None:
            held_out = open_packed_table(stack.enter_context(open_local_copy(evaluation_data, settings.store)))
        model_path = None if model is None else stack.enter_context(open_local_copy(model, settings.store))
        job = _TableJob(settings, source, held_out, model_path)
        return run_job(lambda _: job, settings, training, out, is_bert=isinstance(job.spec.config, BertConfig), **options)


class _TableJob(Job[TableTraining]):
    """The job that trains a language model on a packed table.

    Args:
        settings: The settings of the pipeline.
        source: The packed table.
        held_out: A packed table for evaluations, or None.
        model_path: The user's `--model`, or None.

    Raises:
        InputError: The model and the tables do not fit together.
    """

    result_type = TableTraining
    section: TrainingSettings

    def __init__(
        self, settings: PipelineSettings, source: PackedTable, held_out: PackedTable | None, model_path: Path | None
    ) -> None:
        training = self.section = settings.training
        self._source = source
        if model_path is not None and model_path.is_dir() and has_tokenizer(model_path):
            _check_same_token_ids(source, open_tokenizer(model_path))
        task, start = self._task, self._start = prepare_language_modelling(
            model_path, settings, source.tokenizer, source.max_row_length
        )
        _check_table_fits_model(source, start.sizes)
        if held_out is not None:
            _check_same_token_ids(source, held_out.tokenizer)
            _check_table_fits_model(held_out, start.sizes)
        if source.packs_by_row_length and training.loss_normalization == "balanced":
            raise InputError(
                "training.loss_normalization = balanced: the value is not supported for rows of several lengths; set it to "
                "global or local"
            )
        masked_fraction = task.settings.masked_lm_probability
        targets = self._targets = WordTargets(cast(TaskKind, task.name), training.seed, masked_fraction, task.vocabulary)
        self.spec, self.initial_variables = ModelSpec(start.config, task.head), start.variables
        self.signature = Signature(
            "train",
            {
                "model": start.config.to_json(),
                "training": training.model_dump(
                    exclude=find_keys_changeable_on_resume(TrainingSettings) | {"init_checkpoint"}
                ),
                "task": {"name": task.name, "masked_lm_probability": masked_fraction},
            },
            {
                "data": source.identity,
                "evaluation_data": held_out.identity if held_out is not None else None,
                "weights": start.identity,
            },
        )
        self.evaluation = None
        if held_out is not None:
            vocabulary, packs = start.sizes.vocab_size, training.micro_batch_packs
            self.evaluation = TableEvaluation(held_out, targets, vocabulary, packs, training.evaluate_packs)
        tokens = source.count("tokens")
        predicted_tokens = (
            targets.masked_fraction * tokens if targets.kind == _MASKED else tokens - source.count("sequences")
        )
        self.denominators = LossDenominators(training.loss_normalization, (predicted_tokens / source.count("packs"), 1.0))
        self.checkpoint_settings = {"task": task.name}

    def plan_weight_updates(self, processes: int, initial_processes: int) -> PlannedUpdates:
        """Divide the packs of the table into weight updates. See `Job.plan_weight_updates`."""
        source = self._source
        packs, sequences = source.count("packs"), source.count("sequences")
        plan = RunPlan(
            RunSettings.from_training_section(self.section),
            sequences / packs,
            processes=processes,
            slots_per_pack=source.max_row_length,
            packs=packs,
            mean_tokens=None if source.packs_by_row_length else source.count("tokens") / sequences,
            packs_by_row_length=source.packs_by_row_length,
            initial_processes=initial_processes,
        )

        def make_batches(order: TrainingOrder) -> Iterator[Batch]:
            micro_batches = plan.iterate_micro_batches(order.updates_done, order.packs_done)
            return read_batches_in_order(
                source.stored, partial(source.read_batch, self._targets), micro_batches, order, source.path
            )

        return PlannedUpdates(plan, TaskObjective(self._task), make_batches, self._format_run_description(plan))

    def _format_run_description(self, plan: RunPlan) -> list[str]:
        """Return lines for the user that describe the model, the data and the updates."""
        start, training = self._start, plan.settings
        return [
            f"{start.architecture} ({start.path.name}, {start.kind}): {format_count(start.sizes.layers, 'layer')}, hidden "
            f"size {start.sizes.hidden_size}, vocabulary {start.sizes.vocab_size:,}; {self._task.name}",
            *(
                f"{self._source.path}: {packed.packs:,} packs of {packed.max_sequence_length}, "
                f"{packed.packing_factor:.3f} sequences per pack, {packed.efficiency:.2%} real tokens"
                for packed in self._source.tables
            ),
            f"{training.optimizer}, learning rate {training.learning_rate:g}",
            *format_plan(plan),
        ]

    def finish_run_and_build_result(self, loop: TrainingLoop, updates: PlannedUpdates) -> TableTraining:
        """Write the trained model in the format of `transformers`, and return the result of the run."""
        context, start, source = loop.context, self._start, self._source
        if context.communicator.is_first:
            values = loop.model.copy_variables()
            write_task_folder(context.folder, start, self._task, values, source.tokenizer, source.max_row_length)
        figures = loop.report.metrics.as_json() if loop.report is not None else None
        return TableTraining(
            **loop.collect_result_fields(),
            task=self._task.name,
            model=start.architecture,
            training=WordMetrics(**_compute_language_model_metrics(figures["loss"], figures["accuracy"]))
            if figures is not None
            else None,
            evaluation=cast(WordEvaluation | None, loop.evaluation),
        )


def _compute_language_model_metrics(loss: float, accuracy: float) -> dict[str, float]:
    """Return the metrics `loss`, `accuracy` and `perplexity`, computed from the mean loss and the accuracy."""
    loss, accuracy = float(loss), min(float(accuracy), 1.0)
    return {"loss": loss, "accuracy": accuracy, "perplexity": math.exp(min(loss, 700.0))}


@dataclass(frozen=True)
class TableEvaluation(EvaluationSet[WordEvaluation]):
    """Evaluates a language model on a packed table.

    Which tokens of a sequence are masked does not depend on the pack that contains the sequence.

    Attributes:
        source: The packed table.
        targets: Chooses the tokens to predict.
        vocabulary: The number of tokens in the model's vocabulary.
        batch_packs: The number of packs in a batch of the longest rows. Batches of shorter rows contain more packs.
        max_packs: Evaluate only about this many packs, or all packs if None.
    """

    source: PackedTable
    targets: WordTargets
    vocabulary: int
    batch_packs: int
    max_packs: int | None

    @property
    def metric_sum_count(self) -> int:
        """The number of values that are summed over all evaluation batches, such as the loss and the number of sequences.

        The head has 3 sums. The others are the number of sequences, and how often each token of the vocabulary must be
        predicted.
        """
        return 3 + 1 + self.vocabulary

    def read_batches(self, rank: int, world_size: int) -> Iterator[EvaluationBatch]:
        """Yield the batches that one process evaluates, beginning with the shortest rows."""
        source = self.source
        for index, (table, stored) in enumerate(zip(source.tables, source.stored, strict=True)):
            read_packs = partial(source.read_batch, self.targets, index, epoch=EVALUATION_EPOCH)
            max_packs = self.max_packs
            if max_packs is not None:  # evaluate packs of every row length in proportion to their numbers
                max_packs = math.ceil(max_packs * table.packs / source.count("packs"))
            batch_packs = self.batch_packs * source.max_row_length // table.max_sequence_length
            for batch in read_each_pack_once(stored, read_packs, batch_packs, rank, world_size, max_packs):
                yield batch, None

    def count_labels(self, batch: Batch) -> FloatArray:
        """Return the number of sequences in a batch, followed by how often each token of the vocabulary must be predicted.

        The result is float64 [1 + vocabulary].
        """
        words = count_values(batch["targets"], batch["target_weights"], self.vocabulary)
        return np.concatenate([[batch["sequence_weights"].sum()], words])

    def compute_metrics(self, totals: FloatArray, outputs: Float32Array | None) -> WordEvaluation:
        """Compute the loss, the accuracy, the perplexity and the unigram baseline from values that were summed over all
        batches.

        The unigram baseline is the accuracy of always predicting the most frequent token.

        Raises:
            InputError: The table contains no token to predict.
        """
        (loss, weight, right), sequences, words = totals[:3], totals[3], totals[4:]
        if not weight:
            raise InputError(f"{self.source.path}: the table contains no token to predict; pass a table with longer texts")
        return WordEvaluation(
            **_compute_language_model_metrics(loss / weight, right / weight),
            unigram_baseline=compute_majority_baseline(words),
            sequences=int(sequences),
            words=int(weight),
        )


# --- Reading packed tables
#
# Packs are read in the global order, and the tokens to predict are chosen when a pack is read. The tokenizer is stored with
# the table by `tokenize` and `pack`. Only a few row groups are in memory at a time, so memory does not grow with the table.


@dataclass(frozen=True)
class PackedTable:
    """A packed table, or one packed table per row length, and their tokenizer.

    Attributes:
        path: The folder of the tables.
        tokenizer: The tokenizer of the texts.
        tables: The metadata of the tables, by ascending row length.
        stored: The packs of each table.
    """

    path: Path
    tokenizer: RowTokenizer
    tables: tuple[TableMetadata, ...]
    stored: tuple[StoredPacks, ...] = field(repr=False)

    @property
    def max_row_length(self) -> int:
        """The length of the longest rows, in tokens."""
        return self.tables[-1].max_sequence_length

    @property
    def packs_by_row_length(self) -> tuple[RowPacks, ...]:
        """The number of packs for each row length. Empty if all rows have the same length."""
        rows = tuple(RowPacks(table.max_sequence_length, table.packs) for table in self.tables)
        return rows if len(rows) > 1 else ()

    @property
    def identity(self) -> str:
        """A string that differs between tables with different packs or tokenizers."""
        return " ".join(f"{table.compute_packs_sha256()} {self.tokenizer.sha256}" for table in self.tables)

    def count(self, quantity: Literal["packs", "sequences", "tokens"]) -> int:
        """Return the number of packs, sequences or tokens in all tables."""
        return sum(getattr(table, quantity) for table in self.tables)

    def read_batch(
        self, targets: WordTargets, row_length_index: int, shards: IntArray, records: IntArray, epoch: int
    ) -> Batch:
        """Read packs, check their token ids, and return them as a batch with the tokens to predict.

        Args:
            targets: Chooses the tokens to predict.
            row_length_index: The index of the table in `tables`, which determines the row length.
            shards: The shard of each pack.
            records: The number of each pack in its shard.
            epoch: The epoch, on which the masked tokens depend.

        Raises:
            InputError: A pack has the wrong length, or contains a token id that the tokenizer does not define.
        """
        files: TableFiles = self.stored[row_length_index].files
        table = self.tables[row_length_index]
        packs, length = files.read_records(shards, records), table.max_sequence_length
        for shard, record, pack in zip(shards.tolist(), records.tolist(), packs, strict=True):
            ids = pack["input_ids"]
            if len(ids) != length or ids.min() < 0 or ids.max() >= self.tokenizer.vocabulary_size:
                found = f"{len(ids)} tokens" if len(ids) != length else f"token ids from {ids.min()} to {ids.max()}"
                raise InputError(
                    f"{files.paths[shard]}: row {record} contains {found}, but must contain {length} tokens with ids from 0 "
                    f"to {self.tokenizer.vocabulary_size - 1:,}; pack the table again, or copy the tokenizer.json that "
                    f"created its token ids to the folder {NOTES_NAME} of the table"
                )
        return targets.add_to_packs(packs, epoch, length, table.deepest_pack)


def open_packed_table(path: Path) -> PackedTable:
    """Open the packed table in a local folder, or the packed tables of several row lengths in it.

    Raises:
        InputError: The tables cannot be read, or their tokenizer is missing.
    """
    several = RowLengthTables.read_if_present(path)
    folders = [path] if several is None else [row_table_path(path, length) for length in several.row_lengths]
    tables = tuple(map(TableMetadata.read, folders))
    notes = folders[0] / NOTES_NAME
    if not (notes / TOKENIZER_NAME).is_file():
        raise InputError(
            f"{folders[0]}: the table was packed without its tokenizer; tokenize the texts with `gaudi-bert tokenize`, "
            f"which stores the tokenizer with the table, or copy the tokenizer.json that created its tokens to {notes}"
        )
    stored = tuple(open_packed_tables(folder, sorted(folder.glob("packed-*.parquet"))) for folder in folders)
    return PackedTable(path, open_tokenizer(notes), tables, stored)


def _check_table_fits_model(source: PackedTable, sizes: ModelSizes) -> None:
    """Check that a model has enough positions, tokens and segments for a table.

    Raises:
        InputError: The model is too small for the table.
    """
    if source.max_row_length > sizes.positions:
        raise InputError(
            f"{source.path}: the packs have {source.max_row_length} tokens, but the model has only {sizes.positions} "
            "positions; pack the table into shorter rows, or choose a model with more positions"
        )
    source.tokenizer.check_fits(sizes.vocab_size, sizes.segments)


def _check_same_token_ids(source: PackedTable, other: RowTokenizer) -> None:
    """Check that every token of a table's tokenizer has the same id in a second tokenizer.

    Args:
        source: The table.
        other: The tokenizer of the model, or of a second table.

    Raises:
        InputError: The ids of a token differ.
    """
    ours, theirs = source.tokenizer.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    token = min((token for token, number in ours.items() if theirs.get(token) != number), default=None, key=ours.__getitem__)
    if token is not None:
        id_text = f"the id {theirs[token]}" if token in theirs else "no id"
        raise InputError(
            f"{other.file}: the token {token!r} has {id_text}, but its id in {source.path} is {ours[token]}; tokenize both "
            "with the tokenizer of the model"
        )
