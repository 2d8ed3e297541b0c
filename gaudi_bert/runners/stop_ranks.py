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
from typing import NamedTuple

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
_STOPPED_EARLY = "stopped on request before training had started; run the same command again to resume"


def _expand_variable_options(command: Sequence[str], variable_names: Iterable[str]) -> list[str]:
    """Return the command with its `-x` options expanded, because mpirun does not support patterns.

    Each `-x PREFIX*` becomes one `-x NAME` for every variable of the environment with that prefix. A `-x NAME` is left out
    if the variable is not set, because mpirun would warn about it.
    """
    known_names = set(variable_names)
    expanded: list[str] = []
    arguments = iter(command)
    for argument in arguments:
        value = next(arguments, None) if argument == "-x" else None
        if value is not None and value.endswith("*"):
            for name in sorted(known_names):
                expanded += ["-x", name] if name.startswith(value[:-1]) else []
        elif value is None or value in known_names:
            expanded += [argument] if value is None else [argument, value]
    return expanded


class _MpirunSupervisor:
    """Runs an `mpirun` command, starts it again if workers were stopped, and passes stop signals on to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_requests = 0
        self._pending_signals: deque[signal.Signals] = deque()
        self._parent_id = os.getppid()

    def run_until_done(self) -> int:
        """Run `mpirun`, again after each time that a worker was stopped and its ranks have saved.

        Returns:
            The exit code of the last `mpirun`, or 128 plus the number of the signal that ended it.

        Raises:
            InputError: `mpirun` cannot be started.
            FailedError: A worker does not answer within 10 minutes.
            StoppedError: The run was stopped before any rank had started.
        """
        workers = _list_ssh_workers(self._command, os.environ)
        while True:
            self._wait_for_workers(workers)
            code = self._run_mpirun_once(_rendezvous_variables(workers, os.environ))
            if code != StoppedError.exit_code or self._stop_requests or not workers:
                return code
            _write_to_stderr(
                "a worker was stopped after its ranks had saved a checkpoint; training restarts when all workers answer"
            )
            # The sshd of the removed pod may still answer for a moment, so wait before checking the workers.
            self._sleep_unless_stopped(_REMOVAL_SECONDS)

    def handle_stop_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal. The first one becomes SIGUSR1, so that ranks save, and every further one SIGTERM."""
        self._stop_requests += 1
        self._pending_signals.append(signal.SIGUSR1 if self._stop_requests == 1 else signal.SIGTERM)
        self._send_pending_signals()

    def _send_pending_signals(self) -> None:
        """Send all signals that are not sent yet to the running `mpirun`, if there is one.

        A signal handler may call this method while it already runs. Each signal is sent only once nevertheless, because
        `popleft` is atomic.
        """
        while self._process is not None:
            try:
                number = self._pending_signals.popleft()
            except IndexError:
                return
            self._process.send_signal(number)

    def _run_mpirun_once(self, rendezvous: Mapping[str, str]) -> int:
        """Run `mpirun` to its end with further environment variables, and return its exit code like `run_until_done`."""
        environment = {**os.environ, **rendezvous}
        self._process = None
        # Ctrl-C on a terminal is sent to the whole process group and would interrupt mpirun as well, so mpirun gets a
        # session of its own. Only this process handles Ctrl-C.
        try:
            command = _expand_variable_options(self._command, environment)
            self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        except OSError as error:
            program = self._command[0]
            raise InputError(
                f"{program}: {error.strerror}; set resources.mpi_prefix to the installation folder of Open MPI"
            ) from error
        self._send_pending_signals()  # signals that arrived before the process was stored
        code = None
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_POLL_SECONDS)
            self._stop_if_parent_ended()
        if code == -signal.SIGUSR1 and self._stop_requests:  # mpirun handles SIGUSR1 only once it has started the ranks
            raise StoppedError(_STOPPED_EARLY)
        return code if code >= 0 else 128 - code

    def _wait_for_workers(self, workers: Sequence[_Worker]) -> None:
        """Wait until the sshd of every worker answers. Before that, even the workers' host names may not resolve.

        Raises:
            FailedError: A worker does not answer within 10 minutes.
            StoppedError: A stop signal arrived meanwhile.
        """
        until, is_announced = time.monotonic() + _LONGEST_WAIT_SECONDS, False
        for host, port in workers:
            while (reason := _connection_error(host, port)) is not None:
                missing = f"worker {host} does not answer on port {port} ({reason})"
                if time.monotonic() >= until:
                    raise FailedError(f"{missing} within {_LONGEST_WAIT_SECONDS:g} s; see `kubectl describe pod`")
                if not is_announced:
                    _write_to_stderr(f"waiting for {len(workers)} workers, at most {_LONGEST_WAIT_SECONDS:g} s: {missing}")
                is_announced = True
                self._sleep_unless_stopped(_POLL_SECONDS)

    def _sleep_unless_stopped(self, seconds: float) -> None:
        """Wait for some seconds. Raise a `StoppedError` if a stop signal arrives meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(seconds, _POLL_SECONDS / 4))
            self._stop_if_parent_ended()
            if self._stop_requests:
                raise StoppedError(_STOPPED_EARLY)

    def _stop_if_parent_ended(self) -> None:
        """Request a stop if the process that started this one has ended."""
        if self._stop_requests == 0 and os.getppid() != self._parent_id:
            self.handle_stop_signal(signal.SIGTERM, None)


def _run_mpirun(command: Sequence[str]) -> int:
    """Run an `mpirun` command with stop signals handled, and return the exit code for this process.

    An error is printed to standard error.
    """
    supervisor = _MpirunSupervisor(command)
    with handle_signals((signal.SIGTERM, signal.SIGINT), supervisor.handle_stop_signal):
        try:
            return supervisor.run_until_done()
        except GaudiBertError as error:
            _write_to_stderr(f"error: {error}")
            return error.exit_code


def _write_to_stderr(line: str) -> None:
    """Write a line to standard error at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


# --- the workers of an MPIJob, which may still be starting when their launcher starts

_LONGEST_WAIT_SECONDS = 600.0
_ANSWER_SECONDS = 5.0
_REMOVAL_SECONDS = 5.0
# The MPI operator sets this variable to the path of a file that lists the hosts, with one line `host slots=N` per host.
_HOSTFILE = "OMPI_MCA_orte_default_hostfile"


class _Worker(NamedTuple):
    """A host on which `mpirun` starts ranks by ssh, and the port of its sshd."""

    host: str
    ssh_port: int


def _list_ssh_workers(command: Sequence[str], environment: Mapping[str, str]) -> list[_Worker]:
    """Return the hosts on which `mpirun` starts ranks by ssh. The list is empty if the command does not use ssh."""
    port = re.search(r"-p (\d+)", command[command.index("plm_rsh_args") + 1]) if "plm_rsh_args" in command else None
    hostfile = Path(environment.get(_HOSTFILE, ""))
    if port is None or not hostfile.is_file():
        return []
    hosts = [line.split()[0] for line in hostfile.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [_Worker(host, int(port[1])) for host in hosts]


def _rendezvous_variables(workers: Sequence[_Worker], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with the address and port at which PyTorch ranks connect to each other.

    The rendezvous is on the first worker, or on this machine if there are no workers. Variables that `environment` already
    sets keep their values.
    """
    address = {MASTER_ADDRESS: workers[0].host} if workers else ON_THIS_MACHINE
    values = {**address, MASTER_PORT: str(TORCH_PORT if workers else find_free_port())}
    return {name: environment.get(name, value) for name, value in values.items()}


def _connection_error(host: str, port: int) -> str | None:
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


def _stop_ranks_in_container() -> int:
    """Tell the MPI ranks of this container to save and end, wait until they have ended, and return exit code 0.

    There is no timeout here, because Kubernetes ends the hook after the pod's grace period.
    """
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    with_rank = {process for process in processes if _is_mpi_rank(process)}
    # Processes that a rank has started inherit its environment, so leave them out.
    ranks = [process for process in with_rank if _parent_process_id(process) not in with_rank]
    daemons = {_parent_process_id(process) for process in ranks}
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    while any(_is_mpi_rank(process) for process in ranks):
        time.sleep(_POLL_SECONDS / 10)
    # If sshd were stopped now, it would kill mpirun's daemon, and mpirun would report a lost connection instead of the exit
    # code of the ranks. So wait until the daemon has ended.
    until = time.monotonic() + _DAEMON_SECONDS
    while any(_parent_process_id(daemon) for daemon in daemons) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS / 10)
    return 0


def _is_mpi_rank(process_id: int) -> bool:
    """Return whether a process is a rank of mpirun. False if it has ended or belongs to another user."""
    try:
        return _RANK in b"\0" + Path(f"/proc/{process_id}/environ").read_bytes()
    except OSError:
        return False


def _parent_process_id(process_id: int) -> int:
    """Return the id of the parent of a process, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(_stop_ranks_in_container() if sys.argv[1:] == ["here"] else _run_mpirun(sys.argv[1:]))
