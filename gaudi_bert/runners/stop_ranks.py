"""Give the ranks of an `mpirun` the time to save a checkpoint before they are stopped.

    python3 -m gaudi_bert.runners.stop_ranks mpirun ...

This command starts `mpirun` and handles stop signals for it. The first signal is passed on as SIGUSR1, which mpirun only
forwards to the ranks, so that they have time to save. On SIGTERM, mpirun would kill them soon. A second signal is passed on
as SIGTERM. If the process that started this command ends, that also counts as a stop signal.

On a cluster, the command waits until all workers answer before it starts mpirun. If a worker's pod is stopped and the ranks
have saved, the command starts mpirun again, so that draining a node costs neither a retry of the Job nor its backoff time.
It also sets the rendezvous address of PyTorch ranks.

    python3 -m gaudi_bert.runners.stop_ranks here

This command is the `preStop` hook of an MPIJob worker. The worker runs sshd, which would kill its ranks when Kubernetes
stops it. The hook tells the ranks to save first, and returns when they have ended.
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
    find_free_port,
    handle_signals,
)

_POLL_SECONDS = 1.0
_STOPPED_EARLY = "stopped on request before training had started; the same command resumes"


def _named_variables(command: Sequence[str], environment: Iterable[str]) -> list[str]:
    """Return the command with its `-x` options expanded, because mpirun does not support patterns.

    Each `-x PREFIX*` becomes one `-x NAME` for every variable of the environment with that prefix. A `-x NAME` is left out
    if the variable is not set, because mpirun would warn about it.
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
    """Runs an `mpirun` command, repeatedly if workers are stopped, and passes stop signals on to the running one."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = 0
        self._unsent: deque[signal.Signals] = deque()
        self._starter = os.getppid()

    def run(self) -> int:
        """Run `mpirun`, again after each time that a worker was stopped and its ranks have saved.

        Returns:
            The exit code of the last `mpirun`, or 128 plus the number of the signal that ended it.

        Raises:
            InputError: `mpirun` cannot be started.
            FailedError: A worker does not answer within 10 minutes.
            StoppedError: The run was stopped before any rank had started.
        """
        workers = _workers_of(self._command, os.environ)
        while True:
            self._wait_for_workers(workers)
            code = self._run_once(_meeting_point(workers, os.environ))
            if code != StoppedError.exit_code or self._requests or not workers:
                return code
            _say("a worker was stopped, and its ranks have saved; training starts again when all workers answer")
            # The sshd of the removed pod may still answer for a moment, so wait before checking the workers.
            self._pause(_REMOVAL_SECONDS)

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal. The first one becomes SIGUSR1, so that ranks save, and every further one SIGTERM."""
        self._requests += 1
        self._unsent.append(signal.SIGUSR1 if self._requests == 1 else signal.SIGTERM)
        self._send_requests()

    def _send_requests(self) -> None:
        """Send all signals that are not sent yet to the running `mpirun`, if there is one.

        A signal handler may call this method while it already runs. Each signal is sent only once nevertheless, because
        `popleft` is atomic.
        """
        while self._process is not None:
            try:
                number = self._unsent.popleft()
            except IndexError:
                return
            self._process.send_signal(number)

    def _run_once(self, meeting: Mapping[str, str]) -> int:
        """Run `mpirun` to its end with further environment variables, and return its exit code like `run`."""
        environment = {**os.environ, **meeting}
        self._process = None
        # Ctrl-C on a terminal is sent to the whole process group and would interrupt mpirun as well, so mpirun gets a
        # session of its own. Only this process handles Ctrl-C.
        try:
            command = _named_variables(self._command, environment)
            self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        except OSError as error:
            program = self._command[0]
            raise InputError(f"{program}: {error.strerror}; set resources.mpi_prefix to the folder of Open MPI") from error
        self._send_requests()  # signals that arrived before the process was stored
        code = None
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_POLL_SECONDS)
            self._notice_starter()
        if code == -signal.SIGUSR1 and self._requests:  # mpirun handles SIGUSR1 only once it has started the ranks
            raise StoppedError(_STOPPED_EARLY)
        return code if code >= 0 else 128 - code

    def _wait_for_workers(self, workers: Sequence[tuple[str, int]]) -> None:
        """Wait until the sshd of every worker answers. Before that, even the workers' host names may not resolve.

        Raises:
            FailedError: A worker does not answer within 10 minutes.
            StoppedError: A stop signal arrived meanwhile.
        """
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
        """Wait for some seconds. Raise a `StoppedError` if a stop signal arrives meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(seconds, _POLL_SECONDS / 4))
            self._notice_starter()
            if self._requests:
                raise StoppedError(_STOPPED_EARLY)

    def _notice_starter(self) -> None:
        """Request a stop if the process that started this one has ended."""
        if self._requests == 0 and os.getppid() != self._starter:
            self.request_stop(signal.SIGTERM, None)


def _run_ranks(command: Sequence[str]) -> int:
    """Run an `mpirun` command with stop signals handled, and return the exit code for this process.

    An error is printed to standard error.
    """
    ranks = _Ranks(command)
    with handle_signals((signal.SIGTERM, signal.SIGINT), ranks.request_stop):
        try:
            return ranks.run()
        except GaudiBertError as error:
            _say(f"error: {error}")
            return error.exit_code


def _say(line: str) -> None:
    """Write a line to standard error at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


# --- the workers of an MPIJob, which may still be starting when their launcher starts

_LONGEST_WAIT_SECONDS = 600.0
_ANSWER_SECONDS = 5.0
_REMOVAL_SECONDS = 5.0
# The MPI operator sets this variable to the path of a file that lists the hosts, with one line `host slots=N` per host.
_HOSTFILE = "OMPI_MCA_orte_default_hostfile"


def _workers_of(command: Sequence[str], environment: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the hosts on which `mpirun` starts ranks by ssh, as (host, sshd port). Empty if it does not use ssh."""
    port = re.search(r"-p (\d+)", command[command.index("plm_rsh_args") + 1]) if "plm_rsh_args" in command else None
    hostfile = Path(environment.get(_HOSTFILE, ""))
    if port is None or not hostfile.is_file():
        return []
    hosts = [line.split()[0] for line in hostfile.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(host, int(port[1])) for host in hosts]


def _meeting_point(workers: Sequence[tuple[str, int]], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with the rendezvous address and port of PyTorch ranks.

    The rendezvous is on the first worker, or on this machine if there are no workers. Variables that `environment` already
    sets keep their values.
    """
    address = {MASTER_ADDRESS: workers[0][0]} if workers else ON_THIS_MACHINE
    values = {**address, MASTER_PORT: str(TORCH_PORT if workers else find_free_port())}
    return {name: environment.get(name, value) for name, value in values.items()}


def _refusal(host: str, port: int) -> str | None:
    """Return why a TCP connection to a host and port fails, or None if it succeeds."""
    try:
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


# --- the hook of a worker's pod

_RANK = b"\0OMPI_COMM_WORLD_RANK="
# After a rank has ended, mpirun takes less time than this to end its daemon on the host.
_DAEMON_SECONDS = 20.0


def _stop_ranks_here() -> int:
    """Tell the ranks of this container to save and end, wait until they have ended, and return exit code 0.

    There is no timeout here, because Kubernetes ends the hook after the pod's grace period.
    """
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    with_rank = {process for process in processes if _is_rank(process)}
    # Processes that a rank has started inherit its environment, so leave them out.
    ranks = [process for process in with_rank if _parent_of(process) not in with_rank]
    daemons = {_parent_of(process) for process in ranks}
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    while any(_is_rank(process) for process in ranks):
        time.sleep(_POLL_SECONDS / 10)
    # If sshd were stopped now, it would kill mpirun's daemon, and mpirun would report a lost connection instead of the exit
    # code of the ranks. So wait until the daemon has ended.
    until = time.monotonic() + _DAEMON_SECONDS
    while any(_parent_of(daemon) for daemon in daemons) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS / 10)
    return 0


def _is_rank(process: int) -> bool:
    """Return whether a process is a rank of mpirun. False if it has ended or belongs to another user."""
    try:
        return _RANK in b"\0" + Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False


def _parent_of(process: int) -> int:
    """Return the id of the parent of a process, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(_stop_ranks_here() if sys.argv[1:] == ["here"] else _run_ranks(sys.argv[1:]))
