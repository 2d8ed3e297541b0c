"""The training loop: updates, and between them reports, evaluations, checkpoints and requests to stop.

A report closes the present interval (`objective.py`), which also proves that every loss since the last one was finite;
it always comes before a checkpoint, so a run that went wrong never overwrites what was good. A run that is stopped and
resumed ends with the same bits as one that never was. A stop leaves an evaluation that is due to the run that continues.
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
from gaudi_bert.artefacts.mirrored_folder import publish
from gaudi_bert.common.errors import StoppedError
from gaudi_bert.common.launch import handle_signals
from gaudi_bert.common.progress import Reporter, Task
from gaudi_bert.engines.protocol import Communicator, Device, Engine, Model
from gaudi_bert.reading.global_order import ORDER_VERSION
from gaudi_bert.training.checkpoint import Checkpoint, Progress, remove_old_checkpoints, write_checkpoint
from gaudi_bert.training.evaluate import EvaluationSet
from gaudi_bert.training.input import Batch
from gaudi_bert.training.logs import MetricsWriter, MlperfLog
from gaudi_bert.training.objective import Evaluation, Interval, IntervalReport, TrainingStep
from gaudi_bert.training.run_plan import RunPlan, learning_rate_at

R = TypeVar("R", bound=Artefact)


@dataclass(frozen=True)
class RunContext(Generic[R]):
    """A run whose folder is open: `stored` is its result where it is finished already, else there is work to do.

    `compiled`: whether kernels are compiled, as when the run began; `begun_by`: how many processes began it.
    """

    folder: Path
    result_path: Path
    engine: Engine
    communicator: Communicator
    reporter: Reporter
    device: Device
    signature: Signature
    compiled: bool = False
    begun_by: int = 1
    stored: R | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def finish(self, own_result: R) -> R:
        """Write the first process's result, which every process gets."""
        result = self.communicator.from_first(lambda: own_result)
        if self.communicator.is_first:
            publish(self.folder)
            result.write(self.result_path)
        return result


@dataclass
class TrainingLoop:
    """Trains from `progress` to the last update, which leaves `report` and `evaluation` at their last values.

    `batches` is the training data from there, without end or with as many batches as there are updates. `evaluated` is
    called, in every process, with each update that was evaluated, with `evaluates_first` for update 0 too.
    """

    context: RunContext[Any]
    plan: RunPlan
    step: TrainingStep
    model: Model
    batches: Iterator[Batch]
    progress: Progress
    stored_settings: Mapping[str, Any]
    held_out: EvaluationSet[Any] | None = None
    mlperf_log: MlperfLog | None = None
    evaluated: Callable[[int, Evaluation], None] | None = None
    evaluates_first: bool = False
    report: IntervalReport | None = field(default=None, init=False)
    evaluation: Evaluation | None = field(default=None, init=False)
    _metrics: MetricsWriter | None = field(default=None, init=False)
    _is_cold: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._settings = self.plan.settings
        self._stage = "train" if self._settings.section == "training" else "finetune"
        self._saved = self.progress.update
        self._interval = self._new_interval()

    def run(self) -> None:
        """Train to the end."""
        context, first_update, updates = self.context, self.progress.update, self._settings.updates
        context.communicator.note_saved(first_update)
        if first_update:
            context.reporter.say(f"{self._stage}: resuming after update {first_update}")
        with ExitStack() as stack:
            is_stopping = stack.enter_context(_stop_requests())
            if context.communicator.is_first:
                self._metrics = stack.enter_context(MetricsWriter(context.folder, first_update))
            if self.mlperf_log is not None:
                stack.enter_context(self.mlperf_log).begins(self.progress.sequences)
            # Perhaps the run that is resumed was stopped, or killed, between an update and its evaluation.
            is_due = self.evaluates_first and first_update == 0
            if self._metrics is not None and first_update:
                at_interval = first_update % self._settings.evaluate_every_updates == 0
                is_missing = first_update not in self._metrics.evaluated_updates
                is_due = first_update == updates or (at_interval and is_missing)
            if self.held_out is not None and context.communicator.any_true(is_due):
                self._evaluate(self.held_out)
            task = stack.enter_context(context.reporter.task(self._stage, updates, "updates"))
            task.count_from_now(first_update)
            while not self._is_finished:
                self._update(task)
                self._after_update(context.communicator.any_true(is_stopping()))

    @property
    def _is_finished(self) -> bool:
        return self.reached_target or self.progress.update >= self._settings.updates

    @property
    def reached_target(self) -> bool:
        """Whether the last evaluation reached the target accuracy."""
        target, evaluation = self._settings.target_masked_lm_accuracy, self.evaluation
        return target is not None and evaluation is not None and bool(evaluation.accuracy >= target)

    def outcome(self) -> dict[str, Any]:
        """Return how far and how fast it trained: the fields that training.json has of every run."""
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
            "reached_target": self.reached_target,
        }

    def _update(self, task: Task) -> None:
        context, update = self.context, self.progress.update + 1
        context.communicator.note(f"update {update}", slow=self._is_cold)
        self._interval.begin()
        batches = list(islice(self.batches, len(self.plan.micro_batches_of(update))))
        sums = self.step.run(batches, update, learning_rate_at(update, self._settings))
        self._interval.add(sums, batches)
        if self._is_cold:  # the graph was built, which is done once
            task.count_from_now(update)
        else:
            task.advance()
        self._is_cold = False
        packs = self.progress.packs + self.plan.packs_after(update) - self.plan.packs_after(update - 1)
        self.progress = replace(self.progress, update=update, packs=packs)
        if update == 1 and self._settings.updates > 1:
            context.reporter.show(f"{self._stage}: update 1/{self._settings.updates} done, the graph is built")

    def _after_update(self, stopping: bool) -> None:
        """Report, evaluate and save where it is due."""
        settings, update = self._settings, self.progress.update
        self.context.communicator.note_saved(self._saved)  # the first process has saved it, or would not be here
        last = update == settings.updates
        evaluates = last or (not stopping and update % settings.evaluate_every_updates == 0)
        saves = last or stopping or update % settings.save_every_updates == 0
        if saves or evaluates or update % settings.log_every_updates == 0:
            self._close_interval()
        if evaluates and self.held_out is not None:
            self._evaluate(self.held_out)
        if saves or self._is_finished:
            self._save()
        if stopping and not self._is_finished:
            raise StoppedError(
                f"{self.context.folder}: stopped on request after update {update} of {settings.updates}; "
                "run it again to resume"
            )

    def _new_interval(self) -> Interval:
        return Interval(self.step.objective, self.progress.update + 1, self._is_cold, self._settings.section)

    def _close_interval(self) -> None:
        self.report = report = self._interval.close(self.context.communicator)
        self._interval = self._new_interval()
        sequences, tokens = self.progress.sequences + report.sequences, self.progress.tokens + report.tokens
        self.progress = replace(self.progress, sequences=sequences, tokens=tokens)
        update = self.progress.update
        values = {
            **report.figures.as_json(),
            "learning_rate": learning_rate_at(update, self._settings),
            "gradient_norm": report.gradient_norm,
            **self._work_done(),
            **report.speed(),
        }
        if self._metrics is not None:
            self._metrics.write("train", update, values)
            self.context.reporter.say(f"{self._stage}: {report.line(update, self._settings.updates)}")

    def _evaluate(self, held_out: EvaluationSet[Any]) -> None:
        log, sequences = self.mlperf_log, self.progress.sequences
        if log is not None:
            log.evaluation_begins(sequences)
        self.evaluation = held_out.evaluate(self.model, self.context.communicator)
        update, target = self.progress.update, self._settings.target_masked_lm_accuracy
        succeeded = self._is_finished if target is None else self.reached_target
        if log is not None:
            log.evaluation_ends(sequences, self.evaluation.accuracy, self.evaluation.sequences, succeeded)
        if self.evaluated is not None:
            self.evaluated(update, self.evaluation)
        if self._metrics is not None and update not in self._metrics.evaluated_updates:
            self._metrics.write("evaluation", update, {**self.evaluation.as_json(), **self._work_done()})
            self.context.reporter.say(f"evaluation after update {update}: {self.evaluation.line()}")
        if self.reached_target:
            self.context.reporter.say(f"train: training.target_masked_lm_accuracy = {target:g} is reached, the run ends")

    def _work_done(self) -> dict[str, float]:
        return {"sequences": self.progress.sequences, "tokens": self.progress.tokens}

    def _save(self) -> None:
        context, progress = self.context, self.progress
        self._saved = progress.update
        if not context.communicator.is_first:
            return
        context.communicator.note(f"the checkpoint of update {progress.update}", slow=True)
        first_moments, second_moments = self.step.updates.moments()
        checkpoint = Checkpoint(
            update=progress.update,
            variables=self.model.values(),
            first_moments=first_moments,
            second_moments=second_moments,
            progress={
                "packs": progress.packs,
                "order": ORDER_VERSION,
                "processes": context.begun_by,
                "sequences": progress.sequences,
                "tokens": progress.tokens,
            },
            settings=self.stored_settings,
        )
        # The lines about a run go before the checkpoint that they lead to: a run that is resumed lacks none before it.
        publish(context.folder)
        write_checkpoint(context.checkpoints, checkpoint)
        context.communicator.note_saved(self._saved)
        remove_old_checkpoints(context.checkpoints, self._settings.keep_checkpoints)


# --- Stopping on request: SIGTERM (what Kubernetes sends before it removes a pod) and Ctrl-C end a run after the present
# update. The first signal sets a flag that the loop looks at between updates; a second Ctrl-C interrupts at once.

# SIGUSR1 is what mpirun passes to its ranks when it is to stop (`runners/stop_ranks.py`).
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Tell whether a signal has come; outside the main thread Python allows no handlers, and none does."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    with handle_signals(_SIGNALS, handle):
        yield lambda: bool(received)
