"""The training loop. Between updates, it writes reports, evaluates the model, saves checkpoints and stops on request.

A report closes the current interval (`objective.py`), which raises an error if a loss since the last report was not finite.
A report is always made before a checkpoint, so that a run that diverged cannot replace a good checkpoint. A run that is
stopped and resumed ends with bit-identical weights to a run without interruption. If an evaluation is due when a run is
stopped, the evaluation is done when the run is resumed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.artefacts.mirrored_folder import upload_changed_files
from gaudi_bert.common.errors import StoppedError
from gaudi_bert.common.launch import handle_signals
from gaudi_bert.common.progress import Reporter, Task
from gaudi_bert.engines.protocol import Communicator, Device, Engine, Model
from gaudi_bert.reading.global_order import ORDER_VERSION
from gaudi_bert.training.batches import Batch
from gaudi_bert.training.checkpoint import Checkpoint, Progress, remove_old_checkpoints, write_checkpoint
from gaudi_bert.training.evaluate import EvaluationSet
from gaudi_bert.training.logs import MetricsWriter, MlperfLog
from gaudi_bert.training.objective import Evaluation, IntervalReport, ReportInterval, TrainingStep
from gaudi_bert.training.run_plan import RunPlan, RunSettings

R = TypeVar("R", bound=Artefact)


@dataclass(frozen=True)
class RunContext(Generic[R]):
    """An open run folder, together with the engine, the processes and the device of the run.

    Attributes:
        folder: The folder of the run.
        result_path: The file of the result, which is written last.
        engine: The engine that computes the run.
        communicator: The processes of the run.
        reporter: Shows progress, in the first process only.
        device: The device of this process.
        signature: Everything that the result depends on.
        compiled: Whether kernels are compiled, which is decided when a run begins.
        initial_processes: The number of processes that began the run.
        finished_result: The result of a run that is already finished. None if there is work to do.
    """

    folder: Path
    result_path: Path
    engine: Engine
    communicator: Communicator
    reporter: Reporter
    device: Device
    signature: Signature
    compiled: bool = False
    initial_processes: int = 1
    finished_result: R | None = None

    @property
    def checkpoint_folder(self) -> Path:
        """The folder that contains the checkpoints of the run."""
        return self.folder / "checkpoints"

    def write_and_broadcast_result(self, local_result: R) -> R:
        """Write the result of the first process to a file, and return this result in every process."""
        result = self.communicator.run_on_first_process(lambda: local_result)
        if self.communicator.is_first:
            upload_changed_files(self.folder)
            result.write(self.result_path)
        return result


@dataclass
class TrainingLoop:
    """Runs the remaining updates of a training run, and writes reports and checkpoints in between.

    Attributes:
        context: The run and its folder.
        plan: The plan of the run.
        step: Computes an update.
        model: The model.
        batches: The training batches from the position on. They must suffice for the remaining updates.
        progress: The position of the run, which changes with every update.
        checkpoint_settings: The settings that every checkpoint contains.
        held_out: The data for evaluations, or None.
        mlperf_log: The MLPerf log, or None.
        handle_evaluation: A function that every process calls after an evaluation, with the number of the update and the
            metrics.
        evaluates_first: Whether the model is also evaluated before the first update.
        report: The last report, or None before the first.
        evaluation: The metrics of the last evaluation, or None before the first.
    """

    context: RunContext[Any]
    plan: RunPlan
    step: TrainingStep
    model: Model
    batches: Iterator[Batch]
    progress: Progress
    checkpoint_settings: Mapping[str, Any]
    held_out: EvaluationSet[Any] | None = None
    mlperf_log: MlperfLog | None = None
    handle_evaluation: Callable[[int, Evaluation], None] | None = None
    evaluates_first: bool = False
    report: IntervalReport | None = field(default=None, init=False)
    evaluation: Evaluation | None = field(default=None, init=False)
    _metrics: MetricsWriter | None = field(default=None, init=False)
    _is_cold: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._settings = self.plan.settings
        self._stage = "train" if self._settings.section == "training" else "finetune"
        self._saved = self.progress.update
        self._interval = self._start_interval()

    def run(self) -> None:
        """Train until the last update is done or the target accuracy is reached.

        Raises:
            StoppedError: A signal requested a stop. A checkpoint has been saved.
            FailedError: A loss or gradient is not finite.
        """
        context, first_update, updates = self.context, self.progress.update, self._settings.updates
        context.communicator.record_saved_update(first_update)
        if first_update:
            context.reporter.say(f"{self._stage}: resuming after update {first_update}")
        with ExitStack() as stack:
            is_stopping = stack.enter_context(_handle_stop_signals())
            if context.communicator.is_first:
                self._metrics = stack.enter_context(MetricsWriter(context.folder, first_update))
            if self.mlperf_log is not None:
                stack.enter_context(self.mlperf_log).log_run_start(self.progress.sequences)
            # If the run was stopped between an update and its evaluation, this evaluation is missing, so do it now.
            is_due = self.evaluates_first and first_update == 0
            if self._metrics is not None and first_update:
                at_interval = first_update % self._settings.evaluate_every_updates == 0
                is_due = first_update == updates or (at_interval and first_update not in self._metrics.evaluated_updates)
            if self.held_out is not None and context.communicator.is_true_in_any_process(is_due):
                self._evaluate(self.held_out)
            task = stack.enter_context(context.reporter.task(self._stage, updates, "updates"))
            task.reset_progress(first_update)
            while not self._is_finished:
                self._run_update(task)
                self._report_evaluate_and_save(context.communicator.is_true_in_any_process(is_stopping()))

    @property
    def _is_finished(self) -> bool:
        """Whether all updates are done or the target accuracy is reached."""
        return self.has_reached_target or self.progress.update >= self._settings.updates

    @property
    def has_reached_target(self) -> bool:
        """Whether the last evaluation reached the target accuracy."""
        target, evaluation = self._settings.target_masked_lm_accuracy, self.evaluation
        return target is not None and evaluation is not None and bool(evaluation.accuracy >= target)

    def collect_result_fields(self) -> dict[str, Any]:
        """Return the fields of training.json that all kinds of runs have in common, such as the number of updates and the
        speed.
        """
        progress, plan, report = self.progress, self.plan, self.report
        return {
            "updates": progress.update,
            "sequences": progress.sequences,
            "tokens": progress.tokens,
            "processes": plan.processes,
            "sequences_per_second": report.sequences_per_second if report is not None else None,
            "tokens_per_second": report.tokens_per_second if report is not None else None,
            "slots_per_second": report.slots_per_second if report is not None else None,
            "packing_factor": plan.packing_factor,
            "sequences_per_update": plan.sequences_per_update,
            "reached_target": self.has_reached_target,
        }

    def _run_update(self, task: Task) -> None:
        """Run one weight update, count it and its packs in `self.progress`, and advance the progress bar on the screen."""
        context, update = self.context, self.progress.update + 1
        context.communicator.record_activity(f"update {update}", slow=self._is_cold)
        self._interval.start_clock_if_due()
        batches = list(islice(self.batches, len(self.plan.list_micro_batches(update))))
        sums = self.step.run_update(batches, update, compute_learning_rate(update, self._settings))
        self._interval.record_update(sums, batches)
        if self._is_cold:  # building the graph took part of the time, so the progress bar measures from here
            task.reset_progress(update)
        else:
            task.advance()
        self._is_cold = False
        packs = self.progress.packs + self.plan.count_packs_read(update) - self.plan.count_packs_read(update - 1)
        self.progress = replace(self.progress, update=update, packs=packs)
        if update == 1 and self._settings.updates > 1:
            context.reporter.show(f"{self._stage}: update 1/{self._settings.updates} is done, and the graph is built")

    def _report_evaluate_and_save(self, is_stopping: bool) -> None:
        """Write a report, evaluate the model and save a checkpoint, but each only if it is due after this update.

        Raises:
            StoppedError: A stop is requested, and the run is not finished.
        """
        settings, update = self._settings, self.progress.update
        # The first process finishes writing a checkpoint before it starts the next update. Therefore the last checkpoint is
        # complete by now.
        self.context.communicator.record_saved_update(self._saved)
        last = update == settings.updates
        evaluates = last or (not is_stopping and update % settings.evaluate_every_updates == 0)
        saves = last or is_stopping or update % settings.save_every_updates == 0
        if saves or evaluates or update % settings.log_every_updates == 0:
            self._report_interval()
        if evaluates and self.held_out is not None:
            self._evaluate(self.held_out)
        if saves or self._is_finished:
            self._save_checkpoint()
        if is_stopping and not self._is_finished:
            raise StoppedError(
                f"{self.context.folder}: the run was stopped on request after update {update} of {settings.updates}; run "
                "the same command again to resume it"
            )

    def _start_interval(self) -> ReportInterval:
        """Return a new `ReportInterval`, which collects the losses and the speed of the updates after this one."""
        return ReportInterval(self.step.objective, self.progress.update + 1, self._is_cold, self._settings.section)

    def _report_interval(self) -> None:
        """Write a report on the updates since the last report, and begin a new interval.

        Every process calls this at the same time.
        """
        self.report = report = self._interval.make_report(self.context.communicator)
        self._interval = self._start_interval()
        sequences, tokens = self.progress.sequences + report.sequences, self.progress.tokens + report.tokens
        self.progress = replace(self.progress, sequences=sequences, tokens=tokens)
        update = self.progress.update
        values = {
            **report.metrics.as_json(),
            "learning_rate": compute_learning_rate(update, self._settings),
            "gradient_norm": report.gradient_norm,
            **self._collect_sequence_and_token_counts(),
            **report.collect_throughput(),
        }
        if self._metrics is not None:
            self._metrics.write_report("train", update, values)
            self.context.reporter.say(f"{self._stage}: {report.format_line(update, self._settings.updates)}")

    def _evaluate(self, held_out: EvaluationSet[Any]) -> None:
        """Evaluate the model on held-out data, and log the metrics.

        Every process calls this at the same time.
        """
        log, sequences = self.mlperf_log, self.progress.sequences
        if log is not None:
            log.log_evaluation_start(sequences)
        self.evaluation = held_out.evaluate_model(self.model, self.context.communicator)
        update, target = self.progress.update, self._settings.target_masked_lm_accuracy
        if log is not None:
            is_success = self._is_finished if target is None else self.has_reached_target
            log.log_evaluation_end(sequences, self.evaluation.accuracy, self.evaluation.sequences, is_success)
        if self.handle_evaluation is not None:
            self.handle_evaluation(update, self.evaluation)
        if self._metrics is not None and update not in self._metrics.evaluated_updates:
            self._metrics.write_report(
                "evaluation", update, {**self.evaluation.as_json(), **self._collect_sequence_and_token_counts()}
            )
            self.context.reporter.say(f"evaluation after update {update}: {self.evaluation.format_line()}")
        if self.has_reached_target:
            self.context.reporter.say(f"train: training.target_masked_lm_accuracy = {target:g} is reached, so the run ends")

    def _collect_sequence_and_token_counts(self) -> dict[str, float]:
        """Return how many sequences and tokens the run has read, with the keys used in `metrics.jsonl`."""
        return {"sequences": self.progress.sequences, "tokens": self.progress.tokens}

    def _save_checkpoint(self) -> None:
        """Save a checkpoint and remove old ones.

        Only the first process writes. The other processes only record that the update was saved.
        """
        context, progress = self.context, self.progress
        self._saved = progress.update
        if not context.communicator.is_first:
            return
        context.communicator.record_activity(f"the checkpoint of update {progress.update}", slow=True)
        first_moments, second_moments = self.step.updates.copy_moments()
        checkpoint = Checkpoint(
            update=progress.update,
            variables=self.model.copy_variables(),
            first_moments=first_moments,
            second_moments=second_moments,
            progress={
                "packs": progress.packs,
                "order": ORDER_VERSION,
                "processes": context.initial_processes,
                "sequences": progress.sequences,
                "tokens": progress.tokens,
            },
            settings=self.checkpoint_settings,
        )
        # A checkpoint must never be in the store without the log lines that precede it, so upload the logs first.
        upload_changed_files(context.folder)
        write_checkpoint(context.checkpoint_folder, checkpoint)
        context.communicator.record_saved_update(self._saved)
        remove_old_checkpoints(context.checkpoint_folder, self._settings.keep_checkpoints)


# --- The learning rate: linear warm-up, then polynomial decay to zero
#
# Updates are counted from 1. With W warm-up updates, N updates, peak rate r and power p, the rate of update t is
#
#     rate(t) = r * t / W                                  for t <= W
#     rate(t) = r * (1 - (t - W) / (N - W + 1)) ** p       for t > W, `decay_from: warmup`
#     rate(t) = r * (1 - (t - 1) / N) ** p                 for t > W, `decay_from: start`
#
# No update has a rate of zero. `start` decays as if there had been no warm-up, so that the rate drops when the warm-up ends.
# google-research/bert (p = 1) and LAMB in Habana's Model-References (p = 0.5) do the same, whereas Adam in Model-References
# decays from the end of the warm-up. All of them count updates from 0, so their warm-up is one update behind ours.


def compute_learning_rate(update: int, settings: RunSettings) -> float:
    """Return the learning rate of an update.

    After the last update of the run, the rate is 0, unless the warm-up is longer than the run.

    Args:
        update: The number of the update, from 1.
        settings: The schedule.
    """
    peak, warmup, updates = settings.learning_rate, settings.warmup_updates, settings.updates
    if update <= warmup:
        return peak * update / warmup
    if settings.decay_from == "start":
        remaining = 1.0 - (update - 1) / updates
    else:
        remaining = 1.0 - (update - warmup) / (updates - warmup + 1)
    return float(peak * max(remaining, 0.0) ** settings.decay_power)


# --- Stopping on request
#
# SIGTERM, which Kubernetes sends before it removes a pod, and Ctrl-C end a run after the current update. The first signal
# sets a flag, which the loop checks between updates. A second Ctrl-C interrupts the run immediately.

# mpirun forwards SIGUSR1 to its processes. `runners/stop_ranks.py` sends it to request a stop.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def _handle_stop_signals() -> Iterator[Callable[[], bool]]:
    """Catch stop signals while the context is open. Yield a function that returns whether a signal was received.

    Python allows signal handlers only in the main thread. In other threads, the function always returns False.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    with handle_signals(_SIGNALS, handle):
        yield lambda: bool(received)
