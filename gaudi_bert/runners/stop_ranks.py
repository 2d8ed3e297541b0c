"""Lets ranks save before they are stopped: as the parent of `mpirun`, and as the hook of a worker's pod.

The parent of `mpirun` turns the first request to stop into SIGUSR1, which mpirun hands on to all ranks.

What mpirun does on SIGTERM is what it does when a rank is lost: it waits for `odls_base_sigkill_timeout`, terminates the
other ranks, waits as long again, and kills them (Open MPI 4, `odls_base_default_fns.c`). A time that lets a checkpoint be
saved would thus hold up the end of a run with a lost rank, twice over. So that time is short, and a run that is asked to
stop is told by a signal that mpirun only forwards: its ranks save and end by themselves. A second request goes to mpirun as
it is. The end of the process that started this one, however it came, counts as a request.

    python3 -m gaudi_bert.runners.stop_ranks mpirun ...

A worker of an MPIJob runs sshd, which takes its ranks along when it is stopped. So the pod's `preStop` hook tells the ranks
first, and returns when they have ended; Kubernetes stops sshd after that.

    python3 -m gaudi_bert.runners.stop_ranks here
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import handled_signals

_POLL_SECONDS = 1.0


def named_variables(command: Sequence[str], environment: Iterable[str]) -> list[str]:
    """`command` with each `-x PREFIX*` as one `-x NAME` for every such variable; mpirun itself knows no patterns."""
    written: list[str] = []
    arguments = iter(command)
    for argument in arguments:
        value = next(arguments, None) if argument == "-x" else None
        if value is not None and value.endswith("*"):
            for name in sorted(environment):
                written += ["-x", name] if name.startswith(value[:-1]) else []
        else:
            written += [argument] if value is None else [argument, value]
    return written


def _run_ranks(command: Sequence[str]) -> int:
    """Run `command`, an `mpirun`, to its end.

    The result is its exit code, 128 and the number of the signal that ended it, or 2 where there is no such program.
    """
    requests = 0
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal requests
        requests += 1
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGUSR1 if requests == 1 else signal.SIGTERM)

    with handled_signals((signal.SIGTERM, signal.SIGINT), hand_on):
        # Ctrl-C on a terminal reaches a whole process group: this process alone is to decide what it means.
        try:
            process = subprocess.Popen(named_variables(command, os.environ), start_new_session=True)
        except OSError as error:
            sys.stderr.write(f"error: {command[0]}: {error.strerror}; set resources.mpi_prefix to where Open MPI lies\n")
            return InputError.exit_code
        if requests:  # asked to stop before there was a process to tell
            process.terminate()
        starter = os.getppid()
        while (code := _code_after(process, _POLL_SECONDS)) is None:
            if requests == 0 and os.getppid() != starter:
                hand_on(signal.SIGTERM, None)
    return code if code >= 0 else 128 - code


def _code_after(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code of a process that ends within `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


# --- the hook of a worker's pod

_RANK = b"\0OMPI_COMM_WORLD_RANK="


def _stop_ranks_here() -> int:
    """Tell the ranks of this container to save and end, and wait until they have; the pod's grace period is the limit."""
    ranks = _ranks_here()
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    while any(_is_rank(process) for process in ranks):
        time.sleep(_POLL_SECONDS / 10)
    return 0


def _ranks_here() -> list[int]:
    """The processes that mpirun started, without those that they started themselves."""
    ranks = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and _is_rank(int(entry.name))}
    return sorted(process for process in ranks if _parent_of(process) not in ranks)


def _is_rank(process: int) -> bool:
    """Whether a process has a rank; one that has ended has none, nor has one of another user."""
    try:
        return _RANK in b"\0" + Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False


def _parent_of(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(_stop_ranks_here() if sys.argv[1:] == ["here"] else _run_ranks(sys.argv[1:]))
