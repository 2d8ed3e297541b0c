"""The logs of a step's pods, line by line as they are written, each line once.

A log is followed by a thread of its own. When the connection drops, the log is read again from a little before the last
line that came, and what was shown already is recognised by its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gaudi_bert.common.progress import Reporter
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.connection import ClusterError, StreamDroppedError
from gaudi_bert.runners.kubernetes.step_progress import StepProgress

__all__ = ["LogFollower", "followed_container"]

# More logs at once than a person can read help nobody.
MOST_LOGS = 8
_OVERLAP_SECONDS = 5
_ROLE_LABEL = "training.kubeflow.org/job-role"


def followed_container(pod: Mapping[str, Any]) -> str | None:
    """The container whose log is of interest; None for a pod that only serves others (a worker of an MPIJob)."""
    labels = pod["metadata"].get("labels") or {}
    if labels.get(_ROLE_LABEL) == "worker":
        return None
    return pod["spec"]["containers"][0]["name"]


class _Followed:
    """One log that is being followed."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.last_moment = ""
        self.started = time.monotonic()
        self.reached_end = False

    @property
    def is_read(self) -> bool:
        """Whether somebody reads it at present."""
        return self.thread is not None and self.thread.is_alive()


class LogFollower:
    """Reads the logs of a step's pods: progress goes to `progress`, other lines of a pod that is alone to `reporter`."""

    def __init__(self, cluster: Cluster, reporter: Reporter, progress: StepProgress) -> None:
        self._cluster = cluster
        self._reporter = reporter
        self._progress = progress
        self._followed: dict[str, _Followed] = {}
        self._told: set[int | None] = set()

    def update(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Read the logs of those pods whose container has started, and go on with those that were dropped."""
        for pod in pods:
            name, container = pod["metadata"]["name"], followed_container(pod)
            state = _container_state(pod, container)
            reading = sum(log.is_read for log in self._followed.values())
            log = self._followed.get(name)
            ended = log is not None and (log.is_read or (log.reached_end and state == "terminated"))
            if container is None or state == "waiting" or ended or reading >= MOST_LOGS:
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
                        if not self._progress.take(pod, text) and not self._progress.is_shared:
                            self._reporter.say(prefix + text)
                log.reached_end = True
            except StreamDroppedError:
                pass  # The next update takes the log up again.
            except ClusterError as error:
                self._tell(error)

        log.reached_end = False
        log.thread = threading.Thread(target=show, daemon=True)
        log.thread.start()

    def _tell(self, error: ClusterError) -> None:
        """Say that logs cannot be read, once for each reason; of a pod that is gone, its status tells what became of it."""
        if error.status != 404 and error.status not in self._told:
            self._told.add(error.status)
            self._reporter.say(f"{error}; the run goes on without this log")


def _container_state(pod: Mapping[str, Any], container: str | None) -> str:
    """`running`, `terminated` or `waiting`."""
    for status in pod.get("status", {}).get("containerStatuses") or ():
        if status["name"] == container:
            return next(iter(status.get("state") or {}), "waiting")
    return "waiting"
