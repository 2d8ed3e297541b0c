"""The training loop: updates, and between them reports, evaluations, checkpoints and requests to stop.

A report closes the present interval (`metrics.py`), which also proves that every loss since the last one was finite;
it always comes before a checkpoint, so a run that went wrong never overwrites what was good. The position in the data is a
number of packs, the learning rate, the dropout masks and the order of the data are functions of the update's number: a run
that is stopped and resumed ends with the same bits as one that never was. A stop saves at once and leaves an evaluation
that is due to the run that continues.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from gaudi_bert.artefacts.store.mirrored_folder import publish
from gaudi_bert.common.errors import StoppedError
from gaudi_bert.common.launch import handled_signals
from gaudi_bert.common.progress import Reporter, Task
from gaudi_bert.model.bert import PackedBert
from gaudi_bert.reading.global_order import ORDER
from gaudi_bert.training.checkpoint import Checkpoint, Progress, remove_old_checkpoints, write_checkpoint
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.input.batches import Batch, TrainingOrder
from gaudi_bert.training.metrics import Interval, IntervalReport, MetricsServer, MetricsWriter, progress_line
from gaudi_bert.training.mlperf import RunEvents
from gaudi_bert.training.objective import GLOBAL, LossDenominators, Objective, ReportFigures
from gaudi_bert.training.run_plan import RunPlan
from gaudi_bert.training.tensorflow.optimizers import Optimizer, learning_rate_at
from gaudi_bert.training.tensorflow.step import TrainingStep


class Evaluation(ReportFigures, Protocol):
    """The result of an evaluation, whatever is trained."""

    @property
    def accuracy(self) -> float:
        """What a target is set for, and others are told."""

    @property
    def sequences(self) -> int:
        """Sequences evaluated."""


class _Evaluator(Protocol):
    """Evaluates the model of a run; every process calls it at the same time."""

    def run(self) -> Evaluation:
        """Evaluate."""


@dataclass(frozen=True)
class TrainingRun:
    """All that a run works with.

    `batches` opens the training data, without end or with as many batches as there are updates.
    Every checkpoint holds `stored_settings`. `evaluated` is called, in every process, with each update that was
    evaluated and its figures; `events` is for MLPerf's log.
    """

    plan: RunPlan
    model: PackedBert
    optimizer: Optimizer
    communicator: Communicator
    objective: Objective
    batches: Callable[[TrainingOrder], Iterator[Batch]]
    evaluator: _Evaluator | None
    folder: Path
    stored_settings: Mapping[str, Any]
    reporter: Reporter
    events: RunEvents = field(default_factory=RunEvents)
    denominators: LossDenominators = GLOBAL
    evaluated: Callable[[int, Evaluation], None] | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: where it stands, its last report, its last evaluation, and whether that reached the target."""

    progress: Progress
    report: IntervalReport | None
    evaluation: Evaluation | None
    reached_target: bool = False


class TrainingLoop:
    """Runs one training run from `progress` to its last update."""

    def __init__(self, run: TrainingRun, progress: Progress) -> None:
        self._run, self._progress = run, progress
        settings, communicator = run.plan.settings, run.communicator
        self._settings = settings
        self._step = TrainingStep(
            run.model,
            run.optimizer,
            communicator,
            settings,
            accumulation_steps=run.plan.accumulation_steps,
            denominators=run.denominators,
            objective=run.objective,
        )
        order = TrainingOrder(
            seed=settings.seed,
            shuffle_packs=settings.shuffle_packs,
            rank=communicator.rank,
            size=communicator.size,
            packs_done=progress.packs,
        )
        self._batches = run.batches(order)
        self._interval = self._new_interval(is_cold=True)
        self._is_cold = True
        self._metrics: MetricsWriter | None = None
        self._report: IntervalReport | None = None
        self._evaluation: Evaluation | None = None

    def run(self) -> Outcome:
        """Train to the end."""
        run = self._run
        with ExitStack() as stack:
            stop = stack.enter_context(stop_requests())
            if run.communicator.is_first:
                self._metrics = stack.enter_context(MetricsWriter(run.folder, self._progress.update))
                if self._settings.metrics_port is not None:
                    port, updates = self._settings.metrics_port, self._settings.updates
                    served = MetricsServer(port, self._progress.update, updates, run.plan.keys)
                    self._metrics.serve(stack.enter_context(served))
            stack.enter_context(run.events).begins(self._progress.sequences)
            if run.evaluator is not None and run.communicator.any_true(self._owes_evaluation()):
                self._evaluate(run.evaluator)
            task = stack.enter_context(run.reporter.task(run.plan.keys.stage, self._settings.updates, "updates"))
            task.count_from_now(self._progress.update)
            while not self._is_finished:
                self._update(task)
                self._after_update(run.communicator.any_true(stop.requested))
        return Outcome(self._progress, self._report, self._evaluation, self._reached_target)

    def _owes_evaluation(self) -> bool:
        """Whether the run that is resumed was stopped, or killed, between an update and its evaluation."""
        update, settings = self._progress.update, self._settings
        if self._metrics is None or update == 0:
            return False
        is_due = update % settings.evaluate_every_updates == 0 and update not in self._metrics.evaluated_updates
        return is_due or update == settings.updates

    @property
    def _is_finished(self) -> bool:
        return self._reached_target or self._progress.update >= self._settings.updates

    @property
    def _reached_target(self) -> bool:
        target, evaluation = self._settings.target_masked_lm_accuracy, self._evaluation
        return target is not None and evaluation is not None and bool(evaluation.accuracy >= target)

    def _update(self, task: Task) -> None:
        """Do one update."""
        run, update = self._run, self._progress.update + 1
        run.communicator.note(f"update {update}", slow=self._is_cold)
        self._interval.begin()
        batches = list(islice(self._batches, run.plan.accumulation_steps))
        sums = self._step.run(batches, update, learning_rate_at(update, self._settings))
        self._interval.add(sums, batches)
        if self._is_cold:  # the graph was built, which is done once
            task.count_from_now(update)
        else:
            task.advance()
        self._is_cold = False
        packs = self._progress.packs + run.plan.packs_per_update
        self._progress = replace(self._progress, update=update, packs=packs)
        if update == 1 and self._settings.updates > 1:
            run.reporter.show(f"{run.plan.keys.stage}: update 1/{self._settings.updates} done, the graph is built")

    def _after_update(self, stopping: bool) -> None:
        """Report, evaluate and save where it is due."""
        run, settings, update = self._run, self._settings, self._progress.update
        last = update == settings.updates
        evaluates = last or (not stopping and update % settings.evaluate_every_updates == 0)
        saves = last or stopping or update % settings.save_every_updates == 0
        if saves or evaluates or update % settings.log_every_updates == 0:
            self._close_interval()
        if evaluates and run.evaluator is not None:
            self._evaluate(run.evaluator)
        if saves or self._is_finished:
            self._save()
        if stopping and not self._is_finished:
            raise StoppedError(
                f"{run.folder}: stopped on request after update {update} of {settings.updates}; the same command goes on"
            )

    def _new_interval(self, *, is_cold: bool) -> Interval:
        return Interval(self._run.objective, self._progress.update + 1, is_cold, self._run.plan.keys)

    def _close_interval(self) -> None:
        run = self._run
        report = self._interval.close(run.communicator)
        self._progress = replace(
            self._progress,
            sequences=self._progress.sequences + report.sequences,
            tokens=self._progress.tokens + report.tokens,
        )
        self._report = report
        update = self._progress.update
        self._interval = self._new_interval(is_cold=False)
        values = {
            **report.figures.as_json(),
            "learning_rate": learning_rate_at(update, self._settings),
            "gradient_norm": report.gradient_norm,
            **self._work_done(),
            **report.speed(),
        }
        if self._metrics is not None:
            self._metrics.write("train", update, values)
            seconds_left = (self._settings.updates - update) * report.seconds_per_update
            stage, updates = run.plan.keys.stage, self._settings.updates
            run.reporter.say(progress_line(stage, update, updates, report.figures, values, seconds_left))

    def _evaluate(self, evaluator: _Evaluator) -> None:
        events, sequences = self._run.events, self._progress.sequences
        events.evaluation_begins(sequences)
        self._evaluation = evaluator.run()
        events.evaluation_ends(sequences, self._evaluation.accuracy, self._evaluation.sequences, self._is_finished)
        update = self._progress.update
        if self._run.evaluated is not None:
            self._run.evaluated(update, self._evaluation)
        if self._metrics is not None and update not in self._metrics.evaluated_updates:
            self._metrics.write("evaluation", update, {**self._evaluation.as_json(), **self._work_done()})
            self._run.reporter.say(f"evaluation after update {update}: {self._evaluation.line()}")
        if self._reached_target:
            target = self._settings.target_masked_lm_accuracy
            self._run.reporter.say(f"train: training.target_masked_lm_accuracy = {target:g} is reached, the run ends")

    def _work_done(self) -> dict[str, float]:
        return {"sequences": self._progress.sequences, "tokens": self._progress.tokens}

    def _save(self) -> None:
        run, progress = self._run, self._progress
        if not run.communicator.is_first:
            return
        run.communicator.note(f"the checkpoint of update {progress.update}", slow=True)
        checkpoint = Checkpoint(
            update=progress.update,
            variables={name: variable.numpy() for name, variable in run.model.variables_by_name.items()},
            first_moments={name: variable.numpy() for name, variable in run.optimizer.first_moments.items()},
            second_moments={name: variable.numpy() for name, variable in run.optimizer.second_moments.items()},
            progress={
                "packs": progress.packs,
                "order": ORDER,
                "processes": run.communicator.size,
                "sequences": progress.sequences,
                "tokens": progress.tokens,
            },
            settings=run.stored_settings,
        )
        # The lines about a run go before the checkpoint that they lead to: a run that is resumed lacks none before it.
        publish(run.folder)
        write_checkpoint(run.checkpoints, checkpoint)
        remove_old_checkpoints(run.checkpoints, self._settings.keep_checkpoints)


# --- Stopping on request: SIGTERM (what Kubernetes sends before it removes a pod) and Ctrl-C end a run after the present
# update. The first signal sets a flag that the loop looks at between updates; a second Ctrl-C interrupts at once.

# SIGUSR1 is what mpirun hands on to its ranks when it is asked to stop (`runners/stop_ranks.py`).
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass
class _StopRequest:
    """Whether one of these signals has come."""

    requested: bool = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def stop_requests() -> Iterator[_StopRequest]:
    """While this context lasts, the signals set a flag; outside the main thread Python allows no handlers, and none does."""
    stop = _StopRequest()
    with handled_signals(_SIGNALS, stop.handle):
        yield stop
