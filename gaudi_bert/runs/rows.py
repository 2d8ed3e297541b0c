"""The job that fine-tunes a model for a task on labelled rows, for losses that are sums over rows.

The rows of the complete file are packed before the run. `pairs.py` extends this job for tasks with one loss over all rows of
an update.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.training import BestCheckpoint, FineTuning
from gaudi_bert.artefacts.work_folder import FINETUNING_NAME
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError, join_with_and
from gaudi_bert.common.files import atomic_file, file_identity
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import TASK_NAMES, FineTuneSettings, LoopSettings, TaskSettings
from gaudi_bert.config.values import keys_changeable_on_resume
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.row_lengths import RowLengths, choose_row_lengths, row_cost
from gaudi_bert.packing.strategies import Packing
from gaudi_bert.rows.reading import SkippedRows
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.rows.tokenizing import too_long_policy
from gaudi_bert.rows.types import QuestionRow
from gaudi_bert.tasks.kinds.task import NO_VOCABULARY, TaskObjective, check_settings_apply, task_named
from gaudi_bert.tasks.task_data import (
    TaskData,
    TaskEvaluation,
    TaskResult,
    counts_of,
    labels_of,
    task_batches,
    tokenized_file,
)
from gaudi_bert.tasks.task_models import is_bert, start_weights, vocabulary_of, write_task_folder
from gaudi_bert.training.checkpoint import Checkpoint, find_checkpoint, read_checkpoint, write_checkpoint
from gaudi_bert.training.loop import RunContext, TrainingLoop
from gaudi_bert.training.model_files import SentenceFolder, write_sentence_folder
from gaudi_bert.training.objective import Evaluation
from gaudi_bert.training.run import Job, Prepared
from gaudi_bert.training.run_plan import RunPlan, RunSettings, nearest_micro_batch

PREDICTIONS_NAME, BEST_NAME, BASELINE_NAME = "predictions.jsonl", "best/best.json", "best/baseline.json"

# The row lengths and depths that a dry run compares.
_USUAL_ROWS, _USUAL_DEPTHS = (128, 256, 384, 512), (3, 6, 12, "max")
# Settings that are paths. They are not part of the signature, which contains the identities of the files instead.
_FILES = {"data", "evaluation_data", "init_checkpoint", "vocab"}


@dataclass(frozen=True)
class FineTuneInput:
    """The files of a fine-tuning run.

    Attributes:
        data: The training rows.
        evaluation_data: The rows for evaluations, or None.
        model: The folder of the pretrained model.
        vocabulary: The folder with the tokenizer. None if it is in the folder of the model.
    """

    data: Path
    evaluation_data: Path | None
    model: Path
    vocabulary: Path | None = None


class FineTuneJob(Job[FineTuning]):
    """The job that fine-tunes a model for a task on labelled rows.

    Attributes:
        plans_packs: Whether the training rows of the complete file are packed before the run. Otherwise, the rows of each
            update are packed when they are read.
    """

    result_name, result_type = FINETUNING_NAME, FineTuning
    section: FineTuneSettings
    plans_packs: ClassVar[bool] = True
    _sentences = SentenceFolder()

    def __init__(self, settings: PipelineSettings, files: FineTuneInput, out: Path) -> None:
        self.section = settings.finetune
        self._costs: list[str] = []
        self._is_read = False
        self._settings, self._files, self._out = settings, files, out
        self.is_bert = is_bert(files.model)

    def prepare(self, processes: int, reporter: Reporter) -> Prepared:
        """Read the files at the first call, and plan the packs and the updates. See `Job.prepare`."""
        if not self._is_read:
            self._read_files(reporter)
            self._is_read = True
        return self._prepared(processes)

    def _prepared(self, processes: int) -> Prepared:
        """Plan the updates for a number of processes, and return the job ready to be run."""
        section, task, data = self.section, self._task, self._data
        plan = _plan_run(section, data, processes)
        return Prepared(
            ModelSpec(self._start.config, task.head),
            TaskObjective(task, has_answers=task.name != "regression"),
            plan,
            self._evaluation(),
            lambda plan, order: task_batches(data, task, plan, section.epochs, order),
            self._lines(plan),
            self._signature(),
            details=self._details,
        )

    def _evaluation(self) -> TaskEvaluation | None:
        """Return the evaluation on the held-out rows, or None if there are no held-out rows."""
        if self._held_out is None:
            return None
        packs, seed, hidden_size = self.section.micro_batch_packs, self.section.seed, self._start.sizes.hidden_size
        return TaskEvaluation(self._task, self._held_out, packs, seed, self._best_metric, hidden_size, self._sentences)

    def _read_files(self, reporter: Reporter) -> None:
        """Read and tokenize the rows, pack them, and read the weights.

        Raises:
            InputError: The files cannot be read, or the rows, the model and the settings do not fit together.
        """
        task_settings, section, files = self._task_settings(), self.section, self._files
        if task_settings.name is None:
            raise InputError(f"--task (task.name) is not set; choose one of {', '.join(TASK_NAMES)}")
        name = task_settings.name
        check_settings_apply(name, self._settings.task)
        own = self._sentences if files.vocabulary is None else SentenceFolder()
        tokenizer = self._tokenizer = open_tokenizer(
            files.vocabulary or files.model, own.tokenizer_settings, lower_case=self._sentences.lower_case
        )
        labels = labels_of(files.data, name, task_settings)
        kind = task_named(name)
        self._task = kind(task_settings, labels)
        start = self._start = start_weights(files.model, self._task)
        positions, given = start.sizes.positions, self._given_lengths()
        for key, length in (("row_lengths", given[-1] if given else 0), ("max_sequence_length", self._length())):
            if length > positions:
                raise InputError(f"finetune.{key} = {length}: the model has {positions} positions; set it to no more")
        tokenizer.check_fits(start.sizes.vocab_size, start.sizes.segments)
        data = self._data = self._read(files.data, section.depth, reporter, is_first=True)
        # If some questions have no answer, the model may predict "no answer", for which it needs a threshold.
        has_unanswerable = any(isinstance(row, QuestionRow) and row.answers == () for row in data.rows)
        if has_unanswerable and task_settings.null_score_threshold is None:
            task_settings = task_settings.model_copy(update={"null_score_threshold": 0.0})
        needs_words = name == "masked-language-modelling"
        self._task = kind(task_settings, labels, vocabulary_of(tokenizer) if needs_words else NO_VOCABULARY)
        self._held_out = None
        if files.evaluation_data is not None:
            self._held_out = self._read(files.evaluation_data, section.evaluation_depth, reporter)
        if section.best_metric is not None and self._held_out is None:
            raise InputError("finetune.best_metric: needs evaluation data; give --evaluation FILE")
        self._best_metric = section.best_metric or self._task.best_metric
        if self._best_metric not in self._task.metric_names:
            raise InputError(
                f"finetune.best_metric = {self._best_metric}: {name} has no such metric; choose one of "
                f"{', '.join(self._task.metric_names)}"
            )

    def _task_settings(self) -> TaskSettings:
        """Return the settings of the task. A subclass may add settings from the folder of the model."""
        return self._settings.task

    def _length(self) -> int:
        """Return the maximum number of tokens in a sequence.

        It is the setting `max_sequence_length` if the user set it, or else the largest of the given row lengths, or else the
        maximum of the model.
        """
        section, given = self.section, self._given_lengths()
        if "max_sequence_length" in section.model_fields_set:
            return section.max_sequence_length
        usual = self._sentences.max_sequence_length or section.max_sequence_length
        return given[-1] if given else min(usual, self._start.sizes.positions)

    def _given_lengths(self) -> tuple[int, ...]:
        """Return the row lengths that the user set, ascending. Empty if the user set none, or "auto"."""
        given = self.section.row_lengths
        return given if isinstance(given, tuple) else ()

    def _read(self, path: Path, depth: int | str, reporter: Reporter, *, is_first: bool = False) -> TaskData:
        """Read, tokenize and pack the rows of a file, and tell the user about skipped and truncated rows.

        Args:
            path: The file.
            depth: The maximum number of sequences in a pack, or "max".
            reporter: Shows messages to the user.
            is_first: Whether this is the training file, for which a line also states how files are read.

        Raises:
            InputError: The file cannot be read, or its rows do not fit into rows of the given lengths.
        """
        task, length, skipped = self._task, self._length(), SkippedRows()
        sequences, rows = tokenized_file(
            path,
            task.name,
            task.settings,
            self._tokenizer,
            task.labels,
            length,
            reporter.say if is_first else None,
            skipped,
        )
        if skipped.rows:
            reporter.say(str(skipped))
        if sequences.cut_rows:
            cut = too_long_policy(task.name, task.settings) == "truncate"
            what = f"cut to {length} tokens" if cut else "taken in windows"
            counted = f"{len(sequences):,} texts" if task.name == "embedding" else f"{len(rows):,} rows"
            reporter.say(f"{path}: {sequences.cut_rows:,} of {counted} are too long and were {what}")
        packings: tuple[Packing, ...] = ()
        counts = counts_of(sequences, length)
        if self.section.row_lengths is not None:
            try:
                chosen = self._row_lengths(counts, depth)
            except InputError as error:
                raise InputError(f"finetune.row_lengths: {path}: {error}") from error
            packings = chosen.packings
            self._costs = [chosen.format_cost()] if is_first else self._costs
        elif self.plans_packs or not is_first:  # otherwise, the rows of an update are packed when they are read
            packings = (pack_histogram(Histogram(length, counts), self.section.algorithm, depth),)
        return TaskData(path, file_identity(path), rows, sequences, packings)

    def _row_lengths(self, counts: IntArray, depth: int | str) -> RowLengths:
        """Return the packings for rows of several lengths, which the user gave or which have the lowest estimated cost.

        Args:
            counts: The number of sequences of each length.
            depth: The maximum number of sequences in a pack, or "max".
        """
        section, sizes = self.section, self._start.sizes
        return choose_row_lengths(
            counts,
            partial(row_cost, hidden_size=sizes.hidden_size),
            lengths=self._given_lengths() or None,
            longest=sizes.positions,
            depth=depth,
            algorithm=section.algorithm,
            batch_sequences=section.batch_sequences,
        )

    def _lines(self, plan: RunPlan) -> list[str]:
        """Return the lines for the user that describe the data, the model and the batches."""
        task, data, section, start = self._task, self._data, self.section, self._start
        labels, tokens = f", {len(task.labels)} labels" if task.labels else "", data.sequences.lengths.mean()
        rows = join_with_and(f"{length:,}" for length in data.lengths)
        return [
            f"{task.name}{labels}: {len(data.rows):,} rows of {data.path}, {len(data.sequences):,} sequences, "
            f"{tokens:.1f} tokens on average, rows of {rows}",
            *(
                f"{format_count(packing.packs, 'pack')}{of_length} of depth {packing.depth_used}, "
                f"{packing.packing_factor:.3f} sequences per pack, {packing.efficiency:.2%} real tokens; "
                f"no packing of this depth has fewer than {packing.lower_bound:,}"
                for length, packing in zip(data.lengths, data.packings, strict=True)
                for of_length in [f" of {length:,}" if len(data.lengths) > 1 else ""]
            ),
            *self._costs,
            f"{start.path} ({start.kind}): {format_count(start.sizes.layers, 'layer')}, hidden size "
            f"{start.sizes.hidden_size}; {len(start.fresh)} variables start from random numbers",
            f"asked for {section.batch_sequences:,} sequences per update, {format_count(section.epochs, 'epoch')}; "
            f"{section.optimizer}, learning rate {section.learning_rate:g}",
            *filter(None, [task.note(data.rows)]),
            *plan.short_lines(),
        ]

    def _details(self) -> list[str]:
        """Return the lines of a table that compares other row lengths and depths, for a dry run."""
        section, longest, lengths = self.section, self._data.lengths[-1], self._data.sequences.lengths
        lines = [f"{'rows of':>10}{'depth':>8}{'packs':>12}{'per pack':>12}{'real tokens':>14}{'cut':>10}"]
        for length in sorted({longest, *(usual for usual in _USUAL_ROWS if usual < longest)}):
            counts, cut = np.bincount(np.minimum(lengths, length), minlength=length + 1)[1:], int((lengths > length).sum())
            for depth in _USUAL_DEPTHS:
                packing = pack_histogram(Histogram(length, counts), section.algorithm, depth)
                lines.append(
                    f"{length:>10,}{depth:>8}{packing.packs:>12,}{packing.packing_factor:>12.3f}"
                    f"{packing.efficiency:>14.2%}{cut:>10,}"
                )
        if section.row_lengths is not None:
            return lines
        chosen = self._row_lengths(counts_of(self._data.sequences, longest), section.depth)
        return [*lines, f"finetune.row_lengths = auto gives {chosen.format_cost()}"]

    def _signature(self) -> Signature:
        """Return everything that the result depends on."""
        unused = (
            {"row_lengths"} if self.section.row_lengths is None else set()
        )  # so that runs from before this setting existed can be resumed
        section = self.section.model_dump(mode="json", exclude=keys_changeable_on_resume(FineTuneSettings) | _FILES | unused)
        task = self._task.settings.model_dump(mode="json", exclude={"labels", "n_best"})
        inputs = {
            "data": self._data.identity,
            "evaluation_data": self._held_out.identity if self._held_out is not None else None,
            "model": f"{self._start.path.name}:{self._start.identity}",
            "tokenizer": self._tokenizer.sha256,
            "labels": list(self._task.labels),
        }
        return Signature("finetune", {"task": task, "finetune": section}, inputs)

    def load_start(self, model: Model, reporter: Reporter) -> None:
        """Load the encoder of the pretrained model, and its head if that fits the task."""
        model.load_values(self._start.variables)

    def evaluated(self, run: RunContext[FineTuning], model: Model, update: int, evaluation: Evaluation) -> None:
        """Save the weights to `best/` unless an earlier evaluation was better.

        A kill between the two writes must not leave a `best.json` without its weights, so the weights are written first.
        """
        if not run.communicator.is_first:
            return
        path, figures = self._out / BEST_NAME, evaluation.as_json()
        if update == 0:
            BestCheckpoint(update=0, metric=self._best_metric, metrics=figures).write(self._out / BASELINE_NAME)
        before = BestCheckpoint.read_if_present(path)
        rank = partial(self._task.rank, best_metric=self._best_metric)
        is_best = before is None or rank(figures) >= rank(
            before.metrics
        )  # if they are equal, the later one counts as better
        if is_best and not math.isnan(figures[self._best_metric]):
            settings = {"model": self._start.config.to_json()}
            written = write_checkpoint(path.parent, Checkpoint(update, model.values(), settings=settings))
            BestCheckpoint(update=update, metric=self._best_metric, metrics=figures).write(path)
            for other in path.parent.glob("update-*.safetensors"):
                if other != written:
                    other.unlink()

    def finish(self, loop: TrainingLoop) -> FineTuning:
        """Load the best weights, evaluate them once more, and write the model and its predictions."""
        model, communicator, out, start = loop.model, loop.context.communicator, self._out, self._start
        best = communicator.run_on_first(lambda: BestCheckpoint.read_if_present(out / BEST_NAME))
        if best is not None and communicator.is_first:
            model.load_values(read_checkpoint(find_checkpoint(out / "best")).variables)
        if communicator.size > 1:
            model.load_values(communicator.broadcast(model.values()))
        result = None if loop.held_out is None else cast(TaskResult, loop.held_out.evaluate(model, communicator))
        if communicator.is_first:
            write_task_folder(out, start, self._task, model.values(), self._tokenizer, self._length())
            if self._task.name == "embedding":
                settings, hidden_size = self._task.settings, start.sizes.hidden_size
                write_sentence_folder(out, settings, self._sentences, self._length(), hidden_size)
            if result is not None and result.logits is not None and self._held_out is not None:
                with atomic_file(out / PREDICTIONS_NAME) as handle:
                    for answer in self._task.predictions(result.logits, self._held_out.sequences, self._held_out.rows):
                        handle.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        return FineTuning(
            task=self._task.name,
            model=start.path.name,
            labels=self._task.labels,
            epochs=self.section.epochs,
            updates=loop.plan.settings.updates,
            best_metric=self._best_metric if result is not None else None,
            best_update=loop.progress.update if best is None else best.update,
            evaluated_rows=result.rows if result is not None else 0,
            metrics=dict(result.figures) if result is not None else {},
            **self._figures(),
        )

    def _figures(self) -> dict[str, Any]:
        """Return the packing of the training data, and the metrics of a baseline that is computed without training."""
        data = self._data
        return {
            "baseline": self._task.baseline(data.sequences, self._held_out.sequences) if self._held_out else {},
            "max_sequence_length": data.lengths[-1],
            "sequences": len(data.sequences),
            "packs": data.packs,
            "lower_bound": sum(packing.lower_bound for packing in data.packings),
            "packing_factor": data.packing_factor,
            "depth": max(packing.depth_used for packing in data.packings),
            "algorithm": data.packings[-1].algorithm_used,
        }


def _plan_run(section: FineTuneSettings, data: TaskData, processes: int) -> RunPlan:
    """Return the plan of a run, whose number of updates follows from the number of epochs."""
    factor, micro_batch, rows = data.packing_factor, section.micro_batch_packs, data.row_packs
    if not rows:
        micro_batch = nearest_micro_batch(section.batch_sequences, factor * processes, micro_batch)
    plan = RunPlan(
        run_settings(section, micro_batch, 1, 1),
        factor,
        processes=processes,
        slots_per_pack=data.lengths[-1],
        packs=data.packs,
        mean_tokens=None if rows else float(data.sequences.lengths.mean()),
        rows=rows,
    )
    updates = plan.updates_of(section.epochs)
    return replace(plan, requested=run_settings(section, micro_batch, updates, math.ceil(updates / section.epochs)))


def run_settings(section: FineTuneSettings, micro_batch_packs: int, updates: int, an_epoch: int) -> RunSettings:
    """Return the settings of the training loop for a fine-tuning run.

    Args:
        section: The settings of the section `finetune`.
        micro_batch_packs: The number of packs in a micro-batch of one process.
        updates: The number of updates of the run.
        an_epoch: The number of updates of an epoch. By default, the run evaluates and saves once per epoch.
    """
    of_the_loop = {name: getattr(section, name) for name in LoopSettings.model_fields}
    return RunSettings(
        section="finetune",
        **{**of_the_loop, "micro_batch_packs": micro_batch_packs},
        global_batch_sequences=section.batch_sequences,
        updates=updates,
        warmup_updates=min(updates, round(section.warmup_share * updates)),
        evaluate_every_updates=section.evaluate_every_updates or an_epoch,
        save_every_updates=section.save_every_updates or an_epoch,
    )
