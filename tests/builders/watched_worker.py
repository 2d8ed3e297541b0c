"""A process that is given one bad input after the other, and watched: it may neither hang nor die.

A process for each case would take seconds to start. One that has hung or died is replaced, and the case is told.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.builders.command_line import run_command

SECONDS = 60.0
MEMORY_BYTES = 12 << 30
"""Of addresses: most of what is reserved is never used. What eats memory fails at this, and not the machine."""


class Outcome(NamedTuple):
    """How a case ended: "ended", "raised", "died" or "hung"; and what the function returned, its traceback, or its exit."""

    how: str
    value: Any


class WatchedWorker:
    """Runs functions of modules in one process, for as long as that lives."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> Outcome:
        """Call `function`; both it and the arguments are pickled."""
        pipe = self._pipe or self._start()
        pipe.send((function, arguments))
        if not pipe.poll(seconds):
            self.stop()
            return Outcome("hung", f"for {seconds} seconds")
        try:
            return Outcome(*pipe.recv())
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            self.stop()
            return Outcome("died", f"exit code {code}")

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._pipe, inner = context.Pipe()
        self._process = context.Process(target=_serve, args=(inner,), daemon=True)
        self._process.start()
        inner.close()
        return self._pipe

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = ("ended", function(*arguments))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test says it
                answer = ("raised", "".join(traceback.format_exception(error))[-3000:])
            pipe.send(answer)


def command_in_process(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run `gaudi-bert` with these arguments; exit code, and what it said."""
    done = run_command(*arguments, folder=folder)
    return done.returncode, done.stderr
