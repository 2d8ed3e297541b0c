"""What the pods of a step write, line by line; of pods that share a step, the first one reports.

A thread follows the log. When the connection drops, the log is read again from a little before the last line that came,
and what was shown already is recognised by its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.runners.kubernetes.client import Cluster, ClusterError, Json, NotFoundError, StreamDroppedError
from gaudi_bert.runners.kubernetes.reasons import is_worker, trains_together
from gaudi_bert.runners.launch import RANK_TAG

_EVERY_SECONDS = 60.0
_OVERLAP_SECONDS = 5
_INDEX = "batch.kubernetes.io/job-completion-index"


class StepProgress:
    """Shows the progress of a step, in one line a minute where nothing else is shown."""

    def __init__(self, item: Json, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = item["metadata"]["name"]
        # Pods that train together report how far all of them are.
        self._parts = 1 if trains_together(item) else int(item.get("spec", {}).get("completions") or 1)
        self._reporter, self._clock = reporter, clock
        self._began = self._last_shown = clock()
        self._waits_for: str | None = None
        self._waiting_since = 0.0

    def take(self, line: str) -> None:
        """Show a line of a pod."""
        if self._parts == 1:
            self._last_shown = self._clock()
        self._reporter.say(line)

    def show(self, item: Json, pods: Sequence[Json]) -> None:
        """Show how far the step is, where a minute has gone by (on a terminal: at once)."""
        self._waits_for = None
        at_work = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
        if not at_work or not self._is_due():
            return
        text = f"running for {human_seconds(self._clock() - self._began)}"
        if self._parts > 1:
            text = f"{item.get('status', {}).get('succeeded') or 0} of {self._parts} parts done, {at_work} at work, {text}"
        self._reporter.show(f"{self._name}: {text}")

    def show_waiting(self, reason: str) -> None:
        """Say what the step waits for: at once where that is new, and then every minute with the time that it took."""
        if reason != self._waits_for:
            if self._waits_for is None:
                self._waiting_since = self._clock()
            self._waits_for, self._last_shown = reason, self._clock()
            self._reporter.say(reason)
        elif self._is_due():
            self._reporter.show(f"{reason} ({human_seconds(self._clock() - self._waiting_since)} so far)")

    def _is_due(self) -> bool:
        """Whether a line may be shown now; the minute then starts again."""
        now = self._clock()
        if not self._reporter.live and now - self._last_shown < _EVERY_SECONDS:
            return False
        self._last_shown = now
        return True


def followed_container(pod: Json) -> str | None:
    """Return the container whose log is of interest; None for a pod that only serves others (a worker of an MPIJob)."""
    return None if is_worker(pod) else pod["spec"]["containers"][0]["name"]


@dataclass
class _Followed:
    thread: threading.Thread | None = None
    last_moment: str = ""
    started: float = field(default_factory=time.monotonic)
    reached_end: bool = False


class LogFollower:
    """Reads the log of the pod of a step, or of the first of several, for `progress`."""

    def __init__(self, cluster: Cluster, reporter: Reporter, progress: StepProgress) -> None:
        self._cluster, self._reporter, self._progress = cluster, reporter, progress
        self._followed: dict[str, _Followed] = {}
        self._has_complained = False

    def update(self, pods: Sequence[Json]) -> None:
        """Read the logs of those pods whose container has started, and resume those that were dropped."""
        for pod in pods:
            metadata, container = pod["metadata"], followed_container(pod)
            if container is None or (metadata.get("annotations") or {}).get(_INDEX, "0") != "0":
                continue
            statuses = pod.get("status", {}).get("containerStatuses") or ()
            states = {status["name"]: next(iter(status.get("state") or {}), "waiting") for status in statuses}
            state, log = states.get(container, "waiting"), self._followed.setdefault(metadata["name"], _Followed())
            is_read = log.thread is not None and log.thread.is_alive()
            if state != "waiting" and not is_read and not (log.reached_end and state == "terminated"):
                self._read(log, metadata["name"], container)

    def finish(self, seconds: float) -> None:
        """Let the logs that are still coming in end, for so long at the most."""
        until = time.monotonic() + seconds
        for log in self._followed.values():
            if log.thread is not None:
                log.thread.join(max(0.0, until - time.monotonic()))

    def _read(self, log: _Followed, pod: str, container: str) -> None:
        shown_until = log.last_moment
        since = int(time.monotonic() - log.started) + _OVERLAP_SECONDS if shown_until else None

        def show() -> None:
            try:
                for line in self._cluster.log_lines(pod, container, since):
                    moment, _, text = line.partition(" ")
                    if moment > shown_until:
                        log.last_moment = moment
                        self._progress.take(RANK_TAG.sub("", text))
                log.reached_end = True
            except StreamDroppedError:
                pass  # The next update takes the log up again.
            except ClusterError as error:
                # The status of a pod that is gone explains its end.
                if not isinstance(error, NotFoundError) and not self._has_complained:
                    self._has_complained = True
                    self._reporter.say(f"{error}; the run continues without this log")

        log.reached_end = False
        log.thread = threading.Thread(target=show, daemon=True)
        log.thread.start()
