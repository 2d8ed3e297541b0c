"""Follows the containers of one stage to their end: what they say, what they answer, why they failed, stopping them.

What a container writes to standard error is progress and goes on at once. Standard output is its result, one JSON object.
A stage that fails says why in its last line, `error: ...`; that line becomes our own error, with the same exit code.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.runners.docker.engine import Engine

__all__ = ["STOP_SECONDS", "Follower", "follow_all", "stop_all"]

# Long enough for an update and a checkpoint.
STOP_SECONDS = 120
POLL_SECONDS = 0.2
LAST_LINES = 5
LOG_END_SECONDS = 10.0
_ERROR = "error: "
# mpirun marks each line with its process.
_MPIRUN_TAG = re.compile(r"^\[\d+,(\d+)\]<std(out|err)>: ?")
_ERRORS: dict[int, type[GaudiBertError]] = {2: InputError, 75: StoppedError}


class Follower:
    """One container of a stage.

    Args:
        engine: the daemon.
        container: made, not started.
        reporter: where progress goes.
        mark: put before each line.
        memory_key: the setting that limits its memory, for an error.
    """

    def __init__(self, engine: Engine, container: Any, reporter: Reporter, mark: str, memory_key: str) -> None:
        self.container = container
        self.result: dict[str, Any] = {}
        self._engine, self._reporter, self._mark, self._memory_key = engine, reporter, mark, memory_key
        self._error_line = ""
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._dropped: GaudiBertError | OSError | None = None
        self._thread = threading.Thread(target=self._read, args=(engine.output(container),), daemon=True)

    def start(self) -> None:
        """Start the container and read what it says."""
        self._thread.start()
        self._engine.start(self.container)

    @property
    def has_ended(self) -> bool:
        """Whether the container says nothing any more, because it ended or the daemon did."""
        return not self._thread.is_alive()

    def check(self) -> None:
        """Take the result of a container that has ended.

        Raises:
            InputError, FailedError, StoppedError: it failed; as its exit code says.
        """
        state = self._engine.end_state(self.container)
        self._thread.join(LOG_END_SECONDS)
        code = int(state["ExitCode"])
        if code == 0:
            return
        if state.get("OOMKilled"):
            raise FailedError(
                f"{self._mark}container {self.container.name} used more memory than it may; raise {self._memory_key}"
            )
        if self._error_line:
            raise _ERRORS.get(code, FailedError)(self._mark + self._error_line)
        last = " | ".join(self._last_lines) or state.get("Error") or "it said nothing"
        raise FailedError(f"{self._mark}container {self.container.name} ended with exit code {code}: {last}")

    def _read(self, pieces: Any) -> None:
        outputs = _Lines(self._take_result), _Lines(self._take_progress)
        # A connection that breaks means that the daemon ended; waiting for the container's end says so.
        with suppress(OSError, ValueError):
            for pair in pieces:
                for lines, piece in zip(outputs, pair, strict=True):
                    lines.add(piece or b"")
        for lines in outputs:
            lines.end()

    def _take_progress(self, line: str) -> None:
        text = _MPIRUN_TAG.sub("", line)
        if text.startswith(_ERROR):
            self._error_line = text.removeprefix(_ERROR)
            return
        self._last_lines.append(text)
        self._reporter.say(self._mark + text)

    def _take_result(self, line: str) -> None:
        tag = _MPIRUN_TAG.match(line)
        text = line[tag.end() :] if tag else line
        if tag and (tag[2] == "err" or tag[1] != "0"):
            if tag[2] == "err":
                self._take_progress(text)
            return
        try:
            value = json.loads(text)
        except ValueError:
            self._take_progress(text)
            return
        if isinstance(value, dict):
            self.result.update(value)


class _Lines:
    """Puts lines together from pieces of bytes."""

    def __init__(self, take: Any) -> None:
        self._take = take
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def add(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + self._decode(piece)).split("\n")
        for line in lines:
            self._take(line.rstrip("\r"))

    def end(self) -> None:
        if self._rest:
            self._take(self._rest)


def follow_all(followers: Sequence[Follower]) -> dict[str, Any]:
    """Wait until all have ended: the result of the first.

    Raises:
        InputError, FailedError, StoppedError: of the container that failed first; the others are stopped.
    """
    waiting = list(followers)
    while waiting:
        ended = [follower for follower in waiting if follower.has_ended]
        for follower in ended:
            follower.check()
            waiting.remove(follower)
        if waiting and not ended:
            time.sleep(POLL_SECONDS)
    return followers[0].result


def stop_all(engine: Engine, containers: Sequence[Any]) -> None:
    """Ask all to stop at the same time, and wait until they have."""
    threads = [threading.Thread(target=engine.stop, args=(container, STOP_SECONDS)) for container in containers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
