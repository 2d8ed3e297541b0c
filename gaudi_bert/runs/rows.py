"""The jobs that fine-tune a model for a task on labelled rows.

`FineTuneJob` implements what all tasks have in common. It keeps the best checkpoint, and writes the fine-tuned model.
`RowJob` is the job for tasks whose loss is a sum over rows. Its packs are planned for the complete file before the run.
`pairs.py` contains the job for tasks with one loss over all rows of an update.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.training import BestCheckpoint, FineTuning
from gaudi_bert.common.errors import join_with_and
from gaudi_bert.common.files import atomic_file
from gaudi_bert.common.progress import format_count
from gaudi_bert.config.sections import FineTuneSettings, LoopSettings
from gaudi_bert.config.values import find_keys_changeable_on_resume
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.packing.algorithms import pack_histogram
from gaudi_bert.packing.histogram import Histogram, count_lengths
from gaudi_bert.runs.labelled_data import LabelledData, choose_row_lengths_and_pack
from gaudi_bert.tasks.task import TaskObjective
from gaudi_bert.tasks.task_data import (
    TaskData,
    TaskEvaluation,
    TaskResult,
    iterate_training_batches,
)
from gaudi_bert.tasks.task_models import write_task_folder
from gaudi_bert.training.checkpoint import Checkpoint, find_checkpoint, read_checkpoint, write_checkpoint
from gaudi_bert.training.loop import RunContext, TrainingLoop
from gaudi_bert.training.model_files import write_sentence_settings
from gaudi_bert.training.objective import Evaluation
from gaudi_bert.training.run import Job, PlannedUpdates
from gaudi_bert.training.run_plan import RunPlan, RunSettings, find_micro_batch_size, format_plan

PREDICTIONS_NAME, BEST_NAME, BASELINE_NAME = "predictions.jsonl", "best/best.json", "best/baseline.json"

# A dry run shows how many packs the rows need with each combination of these row lengths and depths. The depth is the
# maximum number of sequences in a pack.
_USUAL_ROWS, _USUAL_DEPTHS = (128, 256, 384, 512), (3, 6, 12, "max")
# These settings are paths, which may change between resumed runs. Therefore the signature omits them, and contains the
# identities of the files instead.
_PATH_SETTINGS = {"data", "evaluation_data", "init_checkpoint", "vocab"}


class FineTuneJob(Job[FineTuning]):
    """The base class of fine-tuning jobs. It keeps the best checkpoint of a run, and writes the fine-tuned model.

    Args:
        section: The settings of the section `finetune`.
        labelled: The rows, the tokenizer and the model.
        out: The folder of the run.
    """

    result_type = FineTuning
    section: FineTuneSettings

    def __init__(self, section: FineTuneSettings, labelled: LabelledData, out: Path) -> None:
        self.section, self._out = section, out
        self._labelled = labelled
        self.spec = ModelSpec(labelled.start.config, labelled.task.head)
        self.signature = _make_run_signature(section, labelled)
        self.evaluation = None
        if labelled.held_out is not None:
            self.evaluation = TaskEvaluation(
                labelled.task,
                labelled.held_out,
                section.micro_batch_packs,
                section.seed,
                labelled.best_metric,
                labelled.start.sizes.hidden_size,
                labelled.folder,
            )
        self.initial_variables = labelled.start.variables
        self.checkpoint_settings = {}

    def save_if_best(self, run: RunContext[FineTuning], model: Model, update: int, evaluation: Evaluation) -> None:
        """Save the weights in the folder `best/`, unless an earlier evaluation was better or the metric is NaN.

        The weights are written before `best.json`, so that `best.json` never exists without its weights, even if the process
        is killed in between. The metrics before the first update are also stored as the baseline.
        """
        if not run.communicator.is_first:
            return
        path, best_metric, metrics = self._out / BEST_NAME, self._labelled.best_metric, evaluation.as_json()
        if update == 0:
            BestCheckpoint(update=0, metric=best_metric, metrics=metrics).write(self._out / BASELINE_NAME)
        before = BestCheckpoint.read_if_present(path)
        rank = partial(self._labelled.task.make_evaluation_sort_key, best_metric=best_metric)
        is_best = before is None or rank(metrics) >= rank(
            before.metrics
        )  # of two equal evaluations, the later one counts as better
        if is_best and not math.isnan(metrics[best_metric]):
            settings = {"model": self._labelled.start.config.to_json()}
            written = write_checkpoint(path.parent, Checkpoint(update, model.copy_variables(), settings=settings))
            BestCheckpoint(update=update, metric=best_metric, metrics=metrics).write(path)
            for other in path.parent.glob("update-*.safetensors"):
                if other != written:
                    other.unlink()

    def finish_run_and_build_result(self, loop: TrainingLoop, updates: PlannedUpdates) -> FineTuning:
        """Load the best weights, evaluate the model with them, and write the model and its predictions. Return the result of
        the run.
        """
        model, communicator, out, labelled = loop.model, loop.context.communicator, self._out, self._labelled
        best = communicator.run_on_first_process(lambda: BestCheckpoint.read_if_present(out / BEST_NAME))
        if best is not None and communicator.is_first:
            model.load_variables(read_checkpoint(find_checkpoint(out / "best")).variables)
        if communicator.size > 1:
            model.load_variables(communicator.broadcast(model.copy_variables()))
        result = None if self.evaluation is None else self.evaluation.evaluate_model(model, communicator)
        if communicator.is_first:
            self._write_model(model, result)
        return FineTuning(
            task=labelled.task.name,
            model=labelled.start.path.name,
            labels=labelled.task.labels,
            epochs=self.section.epochs,
            updates=loop.plan.settings.updates,
            best_metric=labelled.best_metric if result is not None else None,
            best_update=loop.progress.update if best is None else best.update,
            evaluated_rows=result.rows if result is not None else 0,
            metrics=dict(result.figures) if result is not None else {},
            baseline=self._find_baseline_metrics(),
            **updates.packing,
        )

    def _format_model(self) -> str:
        """Return a line for the user that names the model and its sizes."""
        start, sizes = self._labelled.start, self._labelled.start.sizes
        return f"{start.path} ({start.kind}): {format_count(sizes.layers, 'layer')}, hidden size {sizes.hidden_size}"

    def _write_model(self, model: Model, result: TaskResult | None) -> None:
        """Write the files of the fine-tuned model, and its predictions for the evaluation rows."""
        out, labelled = self._out, self._labelled
        write_task_folder(
            out, labelled.start, labelled.task, model.copy_variables(), labelled.tokenizer, labelled.max_sequence_length
        )
        if labelled.task.name == "embedding":
            hidden_size = labelled.start.sizes.hidden_size
            write_sentence_settings(out, labelled.task.settings, labelled.folder, labelled.max_sequence_length, hidden_size)
        if result is not None and result.logits is not None and labelled.held_out is not None:
            with atomic_file(out / PREDICTIONS_NAME) as handle:
                for answer in labelled.task.make_labelled_predictions(
                    result.logits, labelled.held_out.sequences, labelled.held_out.rows
                ):
                    handle.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")

    def _find_baseline_metrics(self) -> dict[str, float]:
        """Return the baseline metrics, so that the user can compare them with those of the fine-tuned model.

        The baseline is the model before training if the run evaluated it, and otherwise a constant prediction.
        """
        task, held_out = self._labelled.task, self._labelled.held_out
        if not self.evaluates_first:
            return (
                {} if held_out is None else task.compute_baseline_metrics(self._labelled.data.sequences, held_out.sequences)
            )
        stored = BestCheckpoint.read_if_present(self._out / BASELINE_NAME)
        metrics = {} if stored is None else stored.metrics
        return {name: metrics[name] for name in task.metric_names if name in metrics}


class RowJob(FineTuneJob):
    """A fine-tuning job for a task with a loss that is a sum over rows. All rows are packed before the run."""

    def plan_weight_updates(self, processes: int, initial_processes: int) -> PlannedUpdates:
        """Divide the packs of the training rows into weight updates. See `Job.plan_weight_updates`."""
        section, task, data = self.section, self._labelled.task, self._labelled.data
        plan = plan_epochs(section, data, processes, initial_processes)
        return PlannedUpdates(
            plan,
            TaskObjective(task, has_answers=task.name != "regression"),
            partial(iterate_training_batches, data, task, plan, section.epochs),
            self._format_run_description(plan),
            {
                "max_sequence_length": data.row_lengths[-1],
                "sequences": len(data.sequences),
                "packs": data.packs,
                "lower_bound": sum(packing.lower_bound for packing in data.packings),
                "packing_factor": data.packing_factor,
                "depth": max(packing.depth_used for packing in data.packings),
                "algorithm": data.packings[-1].algorithm_used,
            },
        )

    def _format_run_description(self, plan: RunPlan) -> list[str]:
        """Return lines for the user that describe the data, the model and the updates."""
        section, labelled = self.section, self._labelled
        task, data = labelled.task, labelled.data
        labels, tokens = f", {len(task.labels)} labels" if task.labels else "", data.sequences.lengths.mean()
        rows = join_with_and(f"{length:,}" for length in data.row_lengths)
        return [
            f"{task.name}{labels}: {len(data.rows):,} rows of {data.path}, {len(data.sequences):,} sequences, "
            f"{tokens:.1f} tokens on average, rows of {rows}",
            *(
                f"{format_count(packing.packs, 'pack')}{of_length} of depth {packing.depth_used}, "
                f"{packing.packing_factor:.3f} sequences per pack, {packing.efficiency:.2%} real tokens; "
                f"no packing with this depth needs fewer than {packing.lower_bound:,} packs"
                for length, packing in zip(data.row_lengths, data.packings, strict=True)
                for of_length in [f" of {length:,}" if len(data.row_lengths) > 1 else ""]
            ),
            *labelled.row_length_notes,
            f"{self._format_model()}; {len(labelled.start.fresh)} variables are initialized randomly",
            f"finetune.batch_sequences requests {section.batch_sequences:,} sequences per update, "
            f"{format_count(section.epochs, 'epoch')}; "
            f"{section.optimizer}, learning rate {section.learning_rate:g}",
            *filter(None, [task.describe_unusual_data(data.rows)]),
            *format_plan(plan),
        ]

    def format_dry_run(self) -> list[str]:
        """Return the lines of a table that compares the numbers of packs for several row lengths and depths."""
        section, longest, lengths = self.section, self._labelled.data.row_lengths[-1], self._labelled.data.sequences.lengths
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
        counts = count_lengths(self._labelled.data.sequences.lengths, longest).counts
        chosen = choose_row_lengths_and_pack(counts, section, self._labelled.start.sizes, section.depth)
        return [*lines, f"finetune.row_lengths = auto would choose {chosen.format_row_cost_comparison()}"]


def _make_run_signature(section: FineTuneSettings, labelled: LabelledData) -> Signature:
    """Return the signature of a fine-tuning run, which contains the settings, the model and the files that determine its
    result.
    """
    # Older versions did not have the setting `row_lengths`. If it is not set, omit it from the signature, so that runs of
    # older versions can be resumed.
    unused = {"row_lengths"} if section.row_lengths is None else set()
    values = section.model_dump(
        mode="json", exclude=find_keys_changeable_on_resume(FineTuneSettings) | _PATH_SETTINGS | unused
    )
    task = labelled.task.settings.model_dump(mode="json", exclude={"labels", "n_best"})
    inputs = {
        "data": labelled.data.identity,
        "evaluation_data": labelled.held_out.identity if labelled.held_out is not None else None,
        "model": f"{labelled.start.path.name}:{labelled.start.identity}",
        "tokenizer": labelled.tokenizer.sha256,
        "labels": list(labelled.task.labels),
    }
    return Signature("finetune", {"task": task, "finetune": values}, inputs)


def plan_epochs(section: FineTuneSettings, data: TaskData, processes: int, initial_processes: int) -> RunPlan:
    """Return the plan of a run that reads the training rows `finetune.epochs` times.

    Args:
        section: The settings of the section `finetune`.
        data: The training rows.
        processes: The number of processes of the run.
        initial_processes: The number of processes that began the run.
    """
    factor, micro_batch, packs_by_row_length = data.packing_factor, section.micro_batch_packs, data.packs_by_row_length
    if not packs_by_row_length:
        micro_batch = find_micro_batch_size(section.batch_sequences, factor * processes, micro_batch)
    plan = RunPlan(
        make_run_settings(section, micro_batch, 1, 1),
        factor,
        processes=processes,
        slots_per_pack=data.row_lengths[-1],
        packs=data.packs,
        mean_tokens=None if packs_by_row_length else float(data.sequences.lengths.mean()),
        packs_by_row_length=packs_by_row_length,
        initial_processes=initial_processes,
    )
    updates = plan.count_updates(section.epochs)
    return replace(plan, requested=make_run_settings(section, micro_batch, updates, math.ceil(updates / section.epochs)))


def make_run_settings(
    section: FineTuneSettings, micro_batch_packs: int, updates: int, updates_per_epoch: int
) -> RunSettings:
    """Convert the settings of the section `finetune` to the settings of the training loop.

    Args:
        section: The settings of the section `finetune`.
        micro_batch_packs: The number of packs in a micro-batch of one process.
        updates: The number of updates of the run.
        updates_per_epoch: The number of updates of an epoch. By default, the run evaluates and saves once per epoch.
    """
    return RunSettings(
        section="finetune",
        **{name: getattr(section, name) for name in LoopSettings.model_fields.keys() - {"micro_batch_packs"}},
        micro_batch_packs=micro_batch_packs,
        global_batch_sequences=section.batch_sequences,
        updates=updates,
        warmup_updates=min(updates, round(section.warmup_share * updates)),
        evaluate_every_updates=section.evaluate_every_updates or updates_per_epoch,
        save_every_updates=section.save_every_updates or updates_per_epoch,
    )
