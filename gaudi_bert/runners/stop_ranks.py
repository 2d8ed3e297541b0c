"""Lets ranks save before they are stopped: as the parent of `mpirun`, and as the hook of a worker's pod.

    python3 -m gaudi_bert.runners.stop_ranks mpirun ...

The first request to stop becomes SIGUSR1, which mpirun only forwards, so that ranks have time to save: on SIGTERM it kills
them soon. A second request goes to mpirun as it is; the end of the process that started this one counts as a request. On a
cluster, mpirun starts when all workers answer, and again when ranks have saved because a worker's pod was stopped: a drained
node costs neither a retry of the Job nor its backoff. Ranks of PyTorch are told where to meet.

    python3 -m gaudi_bert.runners.stop_ranks here

A worker of an MPIJob runs sshd, which takes its ranks along when it is stopped. So the pod's `preStop` hook tells the ranks
first, and returns when they have ended; Kubernetes stops sshd after that.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError
from gaudi_bert.common.launch import (
    MASTER_ADDRESS,
    MASTER_PORT,
    ON_THIS_MACHINE,
    TORCH_PORT,
    free_port,
    handle_signals,
)

_POLL_SECONDS = 1.0
_STOPPED_EARLY = "stopped on request before training had started; the same command resumes"


def _named_variables(command: Sequence[str], environment: Iterable[str]) -> list[str]:
    """`command` with each `-x PREFIX*` as one `-x NAME` for every such variable, and no `-x` for what is not set.

    mpirun itself knows no patterns, and warns of variables that are missing.
    """
    known = set(environment)
    written: list[str] = []
    arguments = iter(command)
    for argument in arguments:
        value = next(arguments, None) if argument == "-x" else None
        if value is not None and value.endswith("*"):
            for name in sorted(known):
                written += ["-x", name] if name.startswith(value[:-1]) else []
        elif value is None or value in known:
            written += [argument] if value is None else [argument, value]
    return written


class _Ranks:
    """`command`, an `mpirun`, as often as it takes; `request_stop` reaches the one that runs."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = 0
        self._unsent: deque[signal.Signals] = deque()
        self._starter = os.getppid()

    def run(self) -> int:
        """The exit code of the last `mpirun`, or 128 and the number of the signal that ended it."""
        workers = _workers_of(self._command, os.environ)
        while True:
            self._wait_for_workers(workers)
            code = self._run_once(_meeting_point(workers, os.environ))
            if code != StoppedError.exit_code or self._requests or not workers:
                return code
            _say("a worker was stopped, and its ranks have saved; training starts again when all workers answer")
            # The sshd of a pod that is being removed answers for a moment longer.
            self._pause(_REMOVAL_SECONDS)

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        """Pass a request on: the first one lets ranks save, the second one goes to mpirun as it is."""
        self._requests += 1
        self._unsent.append(signal.SIGUSR1 if self._requests == 1 else signal.SIGTERM)
        self._send_requests()

    def _send_requests(self) -> None:
        """Send each request once, to a process that is known by now; another request may come meanwhile."""
        while self._process is not None:
            try:
                number = self._unsent.popleft()
            except IndexError:
                return
            self._process.send_signal(number)

    def _run_once(self, meeting: Mapping[str, str]) -> int:
        environment = {**os.environ, **meeting}
        self._process = None
        # Ctrl-C on a terminal reaches an entire process group: this process alone is to decide what it means.
        try:
            command = _named_variables(self._command, environment)
            self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        except OSError as error:
            program = self._command[0]
            raise InputError(f"{program}: {error.strerror}; set resources.mpi_prefix to the folder of Open MPI") from error
        self._send_requests()  # those that came before the line above was done
        code = None
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_POLL_SECONDS)
            self._notice_starter()
        if code == -signal.SIGUSR1 and self._requests:  # it had started no rank yet
            raise StoppedError(_STOPPED_EARLY)
        return code if code >= 0 else 128 - code

    def _wait_for_workers(self, workers: Sequence[tuple[str, int]]) -> None:
        """Return when all workers answer: a launcher that starts together with them cannot even resolve their names."""
        until, is_announced = time.monotonic() + _LONGEST_WAIT_SECONDS, False
        for host, port in workers:
            while (reason := _refusal(host, port)) is not None:
                missing = f"worker {host} does not answer on port {port} ({reason})"
                if time.monotonic() >= until:
                    raise FailedError(f"{missing} after {_LONGEST_WAIT_SECONDS:g} s; see `kubectl describe pod`")
                if not is_announced:
                    _say(f"waiting for {len(workers)} workers, at most {_LONGEST_WAIT_SECONDS:g} s: {missing}")
                is_announced = True
                self._pause(_POLL_SECONDS)

    def _pause(self, seconds: float) -> None:
        """Wait; a `StoppedError` where this process must stop meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(seconds, _POLL_SECONDS / 4))
            self._notice_starter()
            if self._requests:
                raise StoppedError(_STOPPED_EARLY)

    def _notice_starter(self) -> None:
        """The end of the process that started this one counts as a request."""
        if self._requests == 0 and os.getppid() != self._starter:
            self.request_stop(signal.SIGTERM, None)


def _run_ranks(command: Sequence[str]) -> int:
    """Run `command`, an `mpirun`, until its ranks are done; the result is the exit code."""
    ranks = _Ranks(command)
    with handle_signals((signal.SIGTERM, signal.SIGINT), ranks.request_stop):
        try:
            return ranks.run()
        except GaudiBertError as error:
            _say(f"error: {error}")
            return error.exit_code


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


# --- the workers of an MPIJob, which a launcher that is resumed is started together with

_LONGEST_WAIT_SECONDS = 600.0
_ANSWER_SECONDS = 5.0
_REMOVAL_SECONDS = 5.0
# Where the MPI operator lists the hosts, one `host slots=N` a line.
_HOSTFILE = "OMPI_MCA_orte_default_hostfile"


def _workers_of(command: Sequence[str], environment: Mapping[str, str]) -> list[tuple[str, int]]:
    """The hosts on which an `mpirun` starts its ranks by ssh, each with the port of its sshd; none if it needs no ssh."""
    port = re.search(r"-p (\d+)", command[command.index("plm_rsh_args") + 1]) if "plm_rsh_args" in command else None
    hostfile = Path(environment.get(_HOSTFILE, ""))
    if port is None or not hostfile.is_file():
        return []
    hosts = [line.split()[0] for line in hostfile.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(host, int(port[1])) for host in hosts]


def _meeting_point(workers: Sequence[tuple[str, int]], environment: Mapping[str, str]) -> dict[str, str]:
    """Return where ranks of PyTorch meet: at the first worker, or on this machine; what `environment` names stays."""
    address = {MASTER_ADDRESS: workers[0][0]} if workers else ON_THIS_MACHINE
    values = {**address, MASTER_PORT: str(TORCH_PORT if workers else free_port())}
    return {name: environment.get(name, value) for name, value in values.items()}


def _refusal(host: str, port: int) -> str | None:
    """Why nothing answers at a port of `host`; None if something does."""
    try:
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


# --- the hook of a worker's pod

_RANK = b"\0OMPI_COMM_WORLD_RANK="
# Longer than mpirun takes to end what has lost a rank.
_DAEMON_SECONDS = 20.0


def _stop_ranks_here() -> int:
    """Tell the ranks of this container to save and end, and wait until they have; the pod's grace period is the limit."""
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    with_rank = {process for process in processes if _is_rank(process)}
    ranks = [process for process in with_rank if _parent_of(process) not in with_rank]  # without what these have started
    daemons = {_parent_of(process) for process in ranks}
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    while any(_is_rank(process) for process in ranks):
        time.sleep(_POLL_SECONDS / 10)
    # If sshd took mpirun's daemon along, mpirun would report a lost connection instead of ranks that have saved.
    until = time.monotonic() + _DAEMON_SECONDS
    while any(_parent_of(daemon) for daemon in daemons) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS / 10)
    return 0


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
