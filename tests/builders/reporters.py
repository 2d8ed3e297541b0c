"""Reporters for tests: one says nothing, one keeps what is said, one stops the process when it hears of an update.

And how a stage runs in a test.
"""

from __future__ import annotations

import io
import os
import signal
from typing import Any

from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.progress import Reporter

QUIET = Reporter(quiet=True)


def a_run(**changes: Any) -> StageRun:
    """A quiet run of a stage, with other fields where they are given."""
    return StageRun(**{"reporter": QUIET, **changes})


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
