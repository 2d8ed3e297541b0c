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
from gaudi_bert.artefacts.mirrored_folder import fetch_files, mirror_folder, open_local_copy
from gaudi_bert.artefacts.pack_kinds import RowLengthTables, find_pack_kind, list_pack_kind_files, row_table_path
from gaudi_bert.artefacts.packed import TableMetadata
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.training import TableTraining, WordEvaluation, WordMetrics
from gaudi_bert.artefacts.work_folder import TRAINING_NAME
from gaudi_bert.common.arrays import Float32Array, FloatArray, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import format_location, is_in_store
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.config.values import keys_changeable_on_resume
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.model.config import BertConfig, ModelSizes
from gaudi_bert.model.heads import TaskKind
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.rows.tokenizer import RowTokenizer, has_tokenizer, open_tokenizer
from gaudi_bert.rows.tokenizer_files import TOKENIZER_NAME
from gaudi_bert.tables.packed_reader import TableFiles, open_packed_tables
from gaudi_bert.tables.sources import is_table
from gaudi_bert.tasks.kinds.language_modelling import WordTargets
from gaudi_bert.tasks.kinds.task import EVALUATION_EPOCH, TaskObjective
from gaudi_bert.tasks.task_models import start_of_words, write_task_folder
from gaudi_bert.training.evaluate import EvaluationBatch, EvaluationSet, count_values, majority_share
from gaudi_bert.training.input import Batch, TrainingOrder, batches_in_order, each_pack_once
from gaudi_bert.training.loop import TrainingLoop
from gaudi_bert.training.objective import LossDenominators
from gaudi_bert.training.run import Job, Prepared, RunOptions, run_job
from gaudi_bert.training.run_plan import RowPacks, RunPlan, RunSettings

_MASKED: TaskKind = "masked-language-modelling"


def is_packed_table(data: Path, store: StoreSettings | None = None) -> bool:
    """Return whether `data` is a packed table. Otherwise it consists of packed or unpacked records.

    Args:
        data: A local path, a glob pattern or a URL.
        store: The settings of the object store.

    Raises:
        InputError: There is no such data, or it is a table that is not packed.
    """
    if not is_in_store(data) and not os.path.lexists(data) and not glob.glob(os.fspath(data)):
        raise InputError(f"{data}: no such folder or file, and no file matches it as a pattern; check the path")
    with mirror_folder(data, store) if is_in_store(data) else nullcontext(data) as folder:
        tokenised = folder / TokenisedTexts.file_name
        if is_in_store(data):
            fetch_files(*list_pack_kind_files(folder), tokenised)
        is_packed = find_pack_kind(folder) == "table" or RowLengthTables.path_in(folder).is_file()
        is_tokenised = tokenised.is_file()
    if not is_packed and (is_tokenised or (not is_in_store(data) and is_table(data))):
        name = format_location(data)
        raise InputError(f"{name}: is a table that is not packed; run `gaudi-bert pack {name} --out packed/` first")
    return is_packed


def train_on_table(
    settings: PipelineSettings,
    data: Path,
    model: str | None,
    evaluation_data: Path | None,
    out: Path,
    **options: Unpack[RunOptions],
) -> StageOutput[TableTraining] | RunPlan:
    """Train a language model on a packed table.

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
        raise InputError("training.init_checkpoint: for packed records; on a packed table, give its folder with --model")
    for name, usual in (("loss", "token"), ("measure_speedup", False)):
        value = getattr(training, name)
        if value != usual:
            raise InputError(
                f"training.{name} = {str(value).lower()}: for packed records only; a packed table needs {str(usual).lower()}"
            )
    with ExitStack() as stack:
        source, held_out = (
            None if each is None else _open_packed_table(stack.enter_context(open_local_copy(each, settings.store)))
            for each in (data, evaluation_data)
        )
        given = None if model is None else stack.enter_context(open_local_copy(model, settings.store))
        return run_job(_TableJob(settings, cast(_PackedTable, source), held_out, given), settings, out, **options)


class _TableJob(Job[TableTraining]):
    """The job that trains a language model on a packed table.

    Args:
        settings: The settings of the pipeline.
        source: The packed table.
        held_out: A packed table for evaluations, or None.
        given: The user's `--model`, or None.

    Raises:
        InputError: The model and the tables do not fit together.
    """

    result_name, result_type = TRAINING_NAME, TableTraining
    section: TrainingSettings

    def __init__(
        self, settings: PipelineSettings, source: _PackedTable, held_out: _PackedTable | None, given: Path | None
    ) -> None:
        self.section = settings.training
        self._settings, self._source, self._held_out = settings, source, held_out
        if given is not None and given.is_dir() and has_tokenizer(given):
            _check_same_tokens(source, open_tokenizer(given))
        self._task, self._start = start_of_words(given, settings, source.tokenizer, source.length)
        _check_table_fits(source, self._start.sizes)
        if held_out is not None:
            _check_same_tokens(source, held_out.tokenizer)
            _check_table_fits(held_out, self._start.sizes)
        self.is_bert = isinstance(self._start.config, BertConfig)
        share = self._task.settings.masked_lm_probability
        self._targets = WordTargets(cast(TaskKind, self._task.name), settings.training.seed, share, self._task.vocabulary)

    def prepare(self, processes: int, reporter: Reporter) -> Prepared:
        """Plan the updates. See `Job.prepare`."""
        source, start, task, targets, training = self._source, self._start, self._task, self._targets, self.section
        plan, evaluation = self._plan(processes), None
        if self._held_out is not None:
            packs = plan.settings.micro_batch_packs
            evaluation = _TableEvaluation(self._held_out, targets, start.sizes.vocab_size, packs, training.evaluate_packs)
        packs, sequences, tokens = (source.total(figure) for figure in ("packs", "sequences", "tokens"))
        words = targets.share * tokens if targets.kind == _MASKED else tokens - sequences

        def batches(plan: RunPlan, order: TrainingOrder) -> Iterator[Batch]:
            micro_batches = plan.micro_batches(order.updates_done, order.packs_done)
            return batches_in_order(source.stored, partial(source.features, targets), micro_batches, order, source.path)

        return Prepared(
            ModelSpec(start.config, task.head),
            TaskObjective(task),
            plan,
            evaluation,
            batches,
            self._lines(plan),
            self._signature(),
            LossDenominators(training.loss_normalization, (words / packs, 1.0)),
            {"task": task.name},
        )

    def _plan(self, processes: int) -> RunPlan:
        """Return the plan of the run for a number of processes."""
        source = self._source
        if source.row_packs and self._settings.training.loss_normalization == "balanced":
            raise InputError("training.loss_normalization = balanced: for rows of one length; set it to global or local")
        return RunPlan(
            RunSettings.of_training(self._settings.training),
            source.total("sequences") / source.total("packs"),
            processes=processes,
            slots_per_pack=source.length,
            packs=source.total("packs"),
            mean_tokens=None if source.row_packs else source.total("tokens") / source.total("sequences"),
            rows=source.row_packs,
        )

    def _lines(self, plan: RunPlan) -> list[str]:
        """Return the lines for the user that describe the model, the data and the batches."""
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
            *plan.short_lines(),
        ]

    def _signature(self) -> Signature:
        """Return everything that the result depends on."""
        section = self._settings.training.model_dump(
            exclude=keys_changeable_on_resume(TrainingSettings) | {"init_checkpoint"}
        )
        inputs = {
            "data": self._source.identity,
            "evaluation_data": self._held_out.identity if self._held_out is not None else None,
            "weights": self._start.identity,
        }
        task = {"name": self._task.name, "masked_lm_probability": self._task.settings.masked_lm_probability}
        model = self._start.config.to_json()
        return Signature("train", {"model": model, "training": section, "task": task}, inputs)

    def load_start(self, model: Model, reporter: Reporter) -> None:
        """Load the pretrained weights, if there are any."""
        model.load_values(self._start.variables)

    def finish(self, loop: TrainingLoop) -> TableTraining:
        context, start, source = loop.context, self._start, self._source
        if context.communicator.is_first:
            values = loop.model.values()
            write_task_folder(context.folder, start, self._task, values, source.tokenizer, source.length)
        figures = loop.report.figures.as_json() if loop.report is not None else None
        return TableTraining(
            **loop.outcome(),
            task=self._task.name,
            model=start.architecture,
            training=WordMetrics(**_figures(figures["loss"], figures["accuracy"])) if figures is not None else None,
            evaluation=cast(WordEvaluation | None, loop.evaluation),
        )


def _figures(loss: float, accuracy: float) -> dict[str, float]:
    """Return the loss, the accuracy and the perplexity by name."""
    loss, accuracy = float(loss), min(float(accuracy), 1.0)
    return {"loss": loss, "accuracy": accuracy, "perplexity": math.exp(min(loss, 700.0))}


@dataclass(frozen=True)
class _TableEvaluation(EvaluationSet[WordEvaluation]):
    """A packed table to evaluate on. The masked tokens of a sequence do not depend on its pack.

    Attributes:
        source: The packed table.
        targets: Chooses the tokens to predict.
        vocabulary: The number of tokens in the model's vocabulary.
        batch_packs: The number of packs in a batch of the longest rows. Batches of shorter rows contain more packs.
        take_packs: Evaluate only about this many packs, or all packs if None.
    """

    source: _PackedTable
    targets: WordTargets
    vocabulary: int
    batch_packs: int
    take_packs: int | None

    @property
    def sums(self) -> int:
        """3 sums of the head, the number of sequences, and a count per vocabulary token."""
        return 3 + 1 + self.vocabulary

    def batches(self, rank: int, size: int) -> Iterator[EvaluationBatch]:
        source, take = self.source, self.take_packs
        for which, (table, stored) in enumerate(zip(source.tables, source.stored, strict=True)):
            read = partial(source.features, self.targets, which, epoch=EVALUATION_EPOCH)
            share = None if take is None else math.ceil(take * table.packs / source.total("packs"))
            batch_packs = self.batch_packs * source.length // table.max_sequence_length
            for batch in each_pack_once(stored, read, batch_packs, rank, size, share):
                yield batch, None

    def counted(self, batch: Batch) -> FloatArray:
        """Count the sequences, and how often each token is to be predicted, float64 [1 + vocabulary]."""
        words = count_values(batch["targets"], batch["target_weights"], self.vocabulary)
        return np.concatenate([[batch["sequence_weights"].sum()], words])

    def figures(self, totals: FloatArray, outputs: Float32Array | None) -> WordEvaluation:
        """Return the loss, the accuracy, the perplexity and the baseline.

        Raises:
            InputError: The table contains no token to predict.
        """
        (loss, weight, right), sequences, words = totals[:3], totals[3], totals[4:]
        if not weight:
            raise InputError(f"{self.source.path}: has no word to predict; give a table with longer texts")
        return WordEvaluation(
            **_figures(loss / weight, right / weight),
            unigram_baseline=majority_share(words),
            sequences=int(sequences),
            words=int(weight),
        )


# --- Reading packed tables
#
# Packs are read in the global order, and the tokens to predict are chosen when a pack is read. The tokenizer is stored with
# the table by `tokenize` and `pack`. Only a few row groups are in memory at a time, so memory does not grow with the table.


@dataclass(frozen=True)
class _PackedTable:
    """Packed tables, one per row length, and their tokenizer.

    Attributes:
        path: The folder of the tables.
        tokenizer: The tokenizer with which the texts were tokenized.
        tables: The metadata of the tables, by ascending row length.
        stored: The packs of each table.
    """

    path: Path
    tokenizer: RowTokenizer
    tables: tuple[TableMetadata, ...]
    stored: tuple[StoredPacks, ...] = field(repr=False)

    @property
    def length(self) -> int:
        """The length of the longest rows, in tokens."""
        return self.tables[-1].max_sequence_length

    @property
    def row_packs(self) -> tuple[RowPacks, ...]:
        """The number of packs of each row length, as for `RunPlan.rows`. Empty if all rows have the same length."""
        rows = tuple(RowPacks(table.max_sequence_length, table.packs) for table in self.tables)
        return rows if len(rows) > 1 else ()

    @property
    def identity(self) -> str:
        """A string that differs between tables with different packs or tokenizers."""
        return " ".join(f"{table.compute_packs_sha256()} {self.tokenizer.sha256}" for table in self.tables)

    def total(self, figure: Literal["packs", "sequences", "tokens"]) -> int:
        """Return the number of packs, sequences or tokens in all tables."""
        return sum(getattr(table, figure) for table in self.tables)

    def features(self, targets: WordTargets, which: int, shards: IntArray, records: IntArray, epoch: int) -> Batch:
        """Read packs as a batch with targets, after checking their token ids.

        Args:
            targets: Chooses the tokens to predict.
            which: The index of the row length.
            shards: The shard of each pack.
            records: The number of each pack in its shard.
            epoch: The epoch, on which the masked tokens depend.

        Raises:
            InputError: A pack has the wrong length, or a token id that the tokenizer does not have.
        """
        files: TableFiles = self.stored[which].files
        packs, length = files.read_records(shards, records), self.tables[which].max_sequence_length
        for shard, record, pack in zip(shards.tolist(), records.tolist(), packs, strict=True):
            ids = pack["input_ids"]
            if len(ids) != length or ids.min() < 0 or ids.max() >= self.tokenizer.vocabulary_size:
                wrong = f"{len(ids)} tokens" if len(ids) != length else f"the tokens {ids.min()} to {ids.max()}"
                raise InputError(
                    f"{files.paths[shard]}: row {record} holds {wrong}; allowed are {length} tokens from 0 to "
                    f"{self.tokenizer.vocabulary_size - 1:,}; pack the table again, or give the tokenizer of its tokens"
                )
        return targets.of_packs(packs, epoch, length, self.tables[which].deepest_pack)


def _open_packed_table(path: Path) -> _PackedTable:
    """Open the packed tables in a local folder.

    Raises:
        InputError: The tables cannot be read, or their tokenizer is missing.
    """
    several = RowLengthTables.read_if_present(path)
    folders = [path] if several is None else [row_table_path(path, length) for length in several.row_lengths]
    tables = tuple(map(TableMetadata.read, folders))
    notes = folders[0] / NOTES_NAME
    if not (notes / TOKENIZER_NAME).is_file():
        raise InputError(
            f"{folders[0]}: packed without its tokenizer; tokenize the texts with `gaudi-bert tokenize`, which leaves it "
            f"with the table, or copy the tokenizer.json of its tokens to {notes}"
        )
    stored = tuple(open_packed_tables(folder, sorted(folder.glob("packed-*.parquet"))) for folder in folders)
    return _PackedTable(path, open_tokenizer(notes), tables, stored)


def _check_table_fits(source: _PackedTable, sizes: ModelSizes) -> None:
    """Check that a model has enough positions, tokens and segments for a table.

    Raises:
        InputError: The model is too small for the table.
    """
    if source.length > sizes.positions:
        raise InputError(
            f"{source.path}: its packs have {source.length} positions, the model has {sizes.positions}; pack the table to "
            "at most as many, or give the model more"
        )
    source.tokenizer.check_fits(sizes.vocab_size, sizes.segments)


def _check_same_tokens(source: _PackedTable, other: RowTokenizer) -> None:
    """Check that another tokenizer gives every token of a table's tokenizer the same id.

    Args:
        source: The table.
        other: The tokenizer of the model, or of a second table.

    Raises:
        InputError: The ids of a token differ.
    """
    ours, theirs = source.tokenizer.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    token = min((token for token, number in ours.items() if theirs.get(token) != number), default=None, key=ours.__getitem__)
    if token is not None:
        raise InputError(
            f"{other.file}: has {token!r} as {theirs.get(token, 'no token')}, {source.path} as {ours[token]}; tokenize both "
            "with one tokenizer, that of the model"
        )
