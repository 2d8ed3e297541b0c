"""How a command ends: with its result and 0, or with one line of bounded length and the exit code of what happened."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError, shortened
from gaudi_bert.common.files import BAD_PATH

__all__ = ["run_to_the_end"]

LONGEST_LINE = 480
# The extra of this package that brings a module.
EXTRAS = {
    "docker": "docker",
    "kubernetes": "kubernetes",
    "pyarrow": "parquet",
    "safetensors": "tensorflow",
    "seqeval": "tensorflow",
    "sklearn": "tensorflow",
    "tensorflow": "tensorflow",
}


def run_to_the_end(command: Callable[[], object]) -> NoReturn:
    """Run `command` and leave the process: with its exit code, or with that of the error it ended with."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names of files may hold anything
    signals: list[int] = []
    try:
        with _heeded_signals(signals):
            command()
    except (SystemExit, KeyboardInterrupt) as error:
        if signals:  # typer makes an exit code of its own of an interruption
            _end(StoppedError("stopped; the same command goes on from what is finished"))
        code = error.code if isinstance(error, SystemExit) else 1
    except GaudiBertError as error:
        _end(error)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        _end(InputError(_missing(module)))
    except OSError as error:
        _end(_explained(error))
    else:
        code = 0
    try:
        sys.stdout.flush()
    except OSError as error:
        _end(_without_output(error))
    sys.exit(code)


@contextmanager
def _heeded_signals(came: list[int]) -> Iterator[None]:
    """Let SIGTERM (what Kubernetes and Slurm send) and Ctrl-C interrupt; those that come are added to `came`.

    Work that can only be stopped at certain moments asks for both in its own way. A signal that the caller ignores, as
    shells do for background jobs, stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        came.append(number)
        raise KeyboardInterrupt

    heeded = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in heeded}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explained(error: OSError) -> GaudiBertError:
    """What the operating system refused, where nobody expected it: a path that cannot be, or a machine that cannot."""
    if error.filename is None and error.errno == errno.ENOSPC:
        return _without_output(error)
    kind = InputError if error.errno in BAD_PATH else FailedError
    return kind(f"{error.filename or 'this machine'}: {error.strerror or error}; check the path, or the machine")


def _without_output(error: OSError) -> InputError:
    """Standard output took not all; it is given up, or Python would try again at the end of the process."""
    sys.stdout = None  # type: ignore[assignment]
    return InputError(f"standard output: {error.strerror}; send it where there is room")


def _missing(module: str) -> str:
    """What to do where a module that an extra brings is not installed."""
    if module == "tensorflow" and sys.version_info >= (3, 12):
        found = ".".join(map(str, sys.version_info[:2]))
        return f"this command needs TensorFlow 2.15, which has Python 3.10 and 3.11 only, and this is Python {found}"
    return f"this command needs {module}, which is not installed; run: pip install 'gaudi-bert[{EXTRAS[module]}]'"


def _end(error: GaudiBertError) -> NoReturn:
    print(f"error: {shortened(str(error), LONGEST_LINE)}", file=sys.stderr)  # noqa: T201
    sys.exit(error.exit_code)
