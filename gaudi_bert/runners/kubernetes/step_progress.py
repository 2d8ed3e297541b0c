"""How far a step is, in one line a minute, from the progress that its pods write into their logs.

The parts of a stage that is shared out are alike, so the logs that are read (a few of them) stand for the others: shares are
averaged over the pods at work, rates are added up, and the slowest part says how much time is left.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from gaudi_bert.common.progress import Reporter, TaskProgress, human_seconds
from gaudi_bert.runners.kubernetes.problem import Answer

__all__ = ["StepProgress", "parts_of"]

EVERY_SECONDS = 60.0
# `mpirun --tag-output` puts job and rank before each line.
_TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:")
_TRAINING = re.compile(r"train: (update \d+/\d+ \(\d+%\), .* left)")


def parts_of(item: Answer) -> int:
    """How many pods share a step."""
    return int(item.get("spec", {}).get("completions") or 1)


class StepProgress:
    """The progress of one step.

    Args:
        item: its Job or MPIJob.
        reporter: where the lines go.
        clock: seconds.
    """

    def __init__(self, item: Answer, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._parts = item["metadata"]["name"], parts_of(item)
        self._reporter, self._clock = reporter, clock
        self._began = self._last = clock()
        self._tasks: dict[str, TaskProgress] = {}
        self._training = self._training_shown = ""
        self._waits_for: str | None = None
        self._waiting_since = 0.0
        self._lock = threading.Lock()

    @property
    def is_shared(self) -> bool:
        """Whether several pods share the step."""
        return self._parts > 1

    def take(self, pod: str, text: str) -> bool:
        """Whether a line of a pod's log tells its progress: it is kept, and not shown by itself."""
        plain = _TAG.sub("", text)
        task = TaskProgress.parse(plain)
        training = _TRAINING.fullmatch(plain)
        with self._lock:
            if task is not None:
                self._tasks[pod] = task
            elif training is not None:
                self._training = training[1]
        return task is not None or training is not None

    def show(self, item: Answer, pods: Sequence[Answer]) -> None:
        """Show how far the step is, where a minute has gone by (on a terminal: at once)."""
        self._waits_for = None
        at_work = [pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        if at_work and self._is_due():
            self._reporter.show(self.line(int(item.get("status", {}).get("succeeded") or 0), at_work))

    def show_waiting(self, reason: str) -> None:
        """Say what the step waits for: at once where that is new, and then every minute with the time that it took."""
        if reason != self._waits_for:
            if self._waits_for is None:
                self._waiting_since = self._clock()
            self._waits_for, self._last = reason, self._clock()
            self._reporter.say(reason)
        elif self._is_due():
            self._reporter.show(f"{reason} ({human_seconds(self._clock() - self._waiting_since)} so far)")

    def finish(self) -> None:
        """Show what training said last, unless it was shown."""
        if self._training != self._training_shown:
            self._reporter.say(f"{self._name}: {self._training}")

    def line(self, done: int, at_work: Sequence[str]) -> str:
        """The state of the step.

        Args:
            done: how many of its parts have succeeded.
            at_work: the names of the pods that run.
        """
        elapsed = human_seconds(self._clock() - self._began)
        with self._lock:
            training = self._training_shown = self._training
            tasks = [self._tasks[pod] for pod in at_work if pod in self._tasks]
        parts = [f"{done} of {self._parts} parts done, {len(at_work)} at work"] if self._parts > 1 else []
        if training:
            parts.append(training)
        elif tasks:
            parts.append(_together(tasks, len(at_work)))
        else:
            parts.append(f"running for {elapsed}")
        return f"{self._name}: {', '.join(parts)}"

    def _is_due(self) -> bool:
        """Whether a line may be shown now; from then on the minute counts anew."""
        now = self._clock()
        if not self._reporter.live and now - self._last < EVERY_SECONDS:
            return False
        self._last = now
        return True


def _together(tasks: Sequence[TaskProgress], pods: int) -> str:
    """The progress of `pods` pods, of which `tasks` is known, in the work that most of them are at."""
    name, unit = Counter((task.name, task.unit) for task in tasks).most_common(1)[0][0]
    same = [task for task in tasks if (task.name, task.unit) == (name, unit)]
    return TaskProgress(
        name=name,
        share=sum(task.share for task in same) / len(same),
        rate=sum(task.rate for task in same) / len(same) * pods,
        unit=unit,
        seconds_left=max(task.seconds_left for task in same),
    ).line()
