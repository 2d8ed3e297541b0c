"""What the pods of a step write: the log of one that is alone line by line, of those that share a step the last line.

A thread follows each log. When the connection drops, the log is read again from a little before the last line that came,
and what was shown already is recognised by its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.runners.kubernetes.client import Cluster, ClusterError, Json, NotFoundError, StreamDroppedError
from gaudi_bert.runners.kubernetes.pods import STEP_LABEL
from gaudi_bert.runners.kubernetes.reasons import is_worker, needs_all_pods
from gaudi_bert.runners.launch import rank_pieces

_EVERY_SECONDS = 60.0
# More logs at once than a person can read help nobody.
_MOST_LOGS = 8
_OVERLAP_SECONDS = 5
_INDEX = "batch.kubernetes.io/job-completion-index"


class StepProgress:
    """Shows the progress of a step, in one line a minute where nothing else is shown."""

    def __init__(self, item: Json, reporter: Reporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = item["metadata"]["name"]
        # Pods that train together report once, in the first one's log.
        self._parts = 1 if needs_all_pods(item) else int(item.get("spec", {}).get("completions") or 1)
        self._reporter, self._clock = reporter, clock
        self._began = self._last_shown = clock()
        self._last_lines: dict[str, str] = {}
        self._waits_for: str | None = None
        self._waiting_since = 0.0

    def take(self, pod: str, prefix: str, line: str) -> None:
        """Show a line of a pod that is alone; of others keep the last one."""
        if self._parts > 1:
            self._last_lines[pod] = line
        else:
            self._last_shown = self._clock()
            self._reporter.say(prefix + line)

    def show(self, item: Json, pods: Sequence[Json]) -> None:
        """Show how far the step is, where a minute has gone by (on a terminal: at once)."""
        self._waits_for = None
        at_work = [pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        if not at_work or not self._is_due():
            return
        text = f"running for {human_seconds(self._clock() - self._began)}"
        if self._parts > 1:
            done = int(item.get("status", {}).get("succeeded") or 0)
            last_lines = [f"{pod}: {self._last_lines[pod]}" for pod in at_work if pod in self._last_lines]
            text = "; ".join([f"{done} of {self._parts} parts done, {len(at_work)} at work", *(last_lines or [text])])
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


def without_tags(line: str) -> str:
    """Return a line of mpirun's output without the `[1,0]<stderr>:` before what each rank wrote of it."""
    return "".join(text for _, text in rank_pieces(line))


@dataclass
class _Followed:
    thread: threading.Thread | None = None
    last_moment: str = ""
    started: float = field(default_factory=time.monotonic)
    reached_end: bool = False

    @property
    def is_read(self) -> bool:
        """Whether somebody reads it at present."""
        return self.thread is not None and self.thread.is_alive()


class LogFollower:
    """Reads the logs of a step's pods for `progress`."""

    def __init__(self, cluster: Cluster, reporter: Reporter, progress: StepProgress) -> None:
        self._cluster, self._reporter, self._progress = cluster, reporter, progress
        self._followed: dict[str, _Followed] = {}
        self._has_complained = False

    def update(self, pods: Sequence[Json]) -> None:
        """Read the logs of those pods whose container has started, and resume those that were dropped."""
        for pod in pods:
            metadata, container = pod["metadata"], followed_container(pod)
            name, index = metadata["name"], (metadata.get("annotations") or {}).get(_INDEX, "0")
            # Of pods that train together, the first one reports for all.
            is_silent = index != "0" and (metadata.get("labels") or {}).get(STEP_LABEL) == "train"
            statuses = pod.get("status", {}).get("containerStatuses") or ()
            states = [status.get("state") or {} for status in statuses if status["name"] == container]
            state = next(iter(states[0]), "waiting") if states else "waiting"
            reading = sum(log.is_read for log in self._followed.values())
            log = self._followed.get(name)
            ended = log is not None and (log.is_read or (log.reached_end and state == "terminated"))
            if container is None or is_silent or state == "waiting" or ended or reading >= _MOST_LOGS:
                continue
            prefix = f"[{name}] " if len(pods) > 1 else ""
            self._read(log or self._followed.setdefault(name, _Followed()), name, container, prefix)

    def finish(self, seconds: float) -> None:
        """Let the logs that are still coming in end, for so long at the most."""
        until = time.monotonic() + seconds
        for log in self._followed.values():
            if log.thread is not None:
                log.thread.join(max(0.0, until - time.monotonic()))

    def _read(self, log: _Followed, pod: str, container: str, prefix: str) -> None:
        shown_until = log.last_moment
        since = int(time.monotonic() - log.started) + _OVERLAP_SECONDS if shown_until else None

        def show() -> None:
            try:
                for line in self._cluster.log_lines(pod, container, since):
                    moment, _, text = line.partition(" ")
                    if moment > shown_until:
                        log.last_moment = moment
                        self._progress.take(pod, prefix, without_tags(text))
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
