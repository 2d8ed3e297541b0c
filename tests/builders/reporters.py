"""Reporters for tests: one says nothing, one keeps what is said, one stops the process when it hears of an update."""

from __future__ import annotations

import io
import os
import signal

from gaudi_bert.common.progress import Reporter

QUIET = Reporter(quiet=True)


class Listener(Reporter):
    def __init__(self) -> None:
        super().__init__(io.StringIO())

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


class StopAfter(Listener):
    """Sends this process SIGTERM, as Kubernetes does, when it hears of update number `update`."""

    def __init__(self, update: int) -> None:
        super().__init__()
        self._start = (f"train: update {update}/", f"finetune: update {update}/")

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith(self._start):
            os.kill(os.getpid(), signal.SIGTERM)
