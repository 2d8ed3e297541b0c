"""Let the ranks that `mpirun` started save a checkpoint before they are stopped.

    python3 -m gaudi_bert.runners.stop_ranks mpirun ...

This command starts `mpirun` and handles stop signals for it. It forwards the first signal as SIGUSR1, because mpirun only
passes SIGUSR1 on to the ranks, which then save and end. It forwards a second signal as SIGTERM, after which mpirun soon
kills the ranks. If the process that started this command ends, that also counts as a stop signal.

On a cluster, the command waits until all workers accept connections before it starts mpirun. If a worker's pod is stopped
and the ranks have saved, the command starts mpirun again. Draining a node therefore uses neither a retry of the Job nor its
backoff time. The command also sets the rendezvous address of PyTorch ranks.

    python3 -m gaudi_bert.runners.stop_ranks here

This command is the `preStop` hook of an MPIJob worker. The worker runs sshd, which would kill its ranks when Kubernetes
stops it. The hook sends the ranks a signal to save, and returns when they have ended.
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


def _expand_mpirun_environment_patterns(mpirun_command: Sequence[str], variable_names: Iterable[str]) -> list[str]:
    """Replace name patterns in the `-x` options of an `mpirun` command with the names of matching environment variables.

    This is necessary because mpirun does not support patterns. Each `-x PREFIX*` becomes one `-x NAME` for every variable
    with that prefix. A `-x NAME` is left out if the variable is not set, because mpirun would warn about it.

    Args:
        mpirun_command: The command line of `mpirun`.
        variable_names: The names of all environment variables that are set.
    """
    known_names = set(variable_names)
    expanded: list[str] = []
    arguments = iter(mpirun_command)
    for argument in arguments:
        value = next(arguments, None) if argument == "-x" else None
        if value is not None and value.endswith("*"):
            for name in sorted(known_names):
                expanded += ["-x", name] if name.startswith(value[:-1]) else []
        elif value is None or value in known_names:
            expanded += [argument] if value is None else [argument, value]
    return expanded


class _MpirunSupervisor:
    """Runs `mpirun`, forwards stop signals to it, and restarts it after a worker was stopped."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_requests = 0
        self._pending_signals: deque[signal.Signals] = deque()
        self._parent_id = os.getppid()

    def run_until_done(self) -> int:
        """Run `mpirun`, and restart it whenever a worker was stopped after its ranks had saved a checkpoint.

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
            code = self._run_mpirun_once(_build_rendezvous_variables(workers, os.environ))
            if code != StoppedError.exit_code or self._stop_requests or not workers:
                return code
            sys.stderr.write(
                "a worker was stopped after its ranks had saved a checkpoint; training restarts when all workers answer\n"
            )
            # The sshd of the removed pod may still accept connections for a moment. The next check would mistake this pod
            # for its replacement, so wait first.
            self._sleep_unless_stopped(_REMOVAL_SECONDS)

    def handle_stop_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a stop signal to `mpirun`. The first signal is sent as SIGUSR1, so that the ranks save a checkpoint, and
        all later signals as SIGTERM.
        """
        self._stop_requests += 1
        self._pending_signals.append(signal.SIGUSR1 if self._stop_requests == 1 else signal.SIGTERM)
        self._send_pending_signals()

    def _send_pending_signals(self) -> None:
        """If `mpirun` is running, send all pending signals to it. Otherwise keep them pending.

        A signal handler may call this method while another call is in progress. Each signal is still sent only once, because
        `popleft` is atomic.
        """
        while self._process is not None:
            try:
                number = self._pending_signals.popleft()
            except IndexError:
                return
            self._process.send_signal(number)

    def _run_mpirun_once(self, rendezvous: Mapping[str, str]) -> int:
        """Run `mpirun` once, with additional environment variables, and return its exit code.

        If a signal ended it, return 128 plus the number of the signal.
        """
        environment = {**os.environ, **rendezvous}
        self._process = None
        # A terminal sends Ctrl-C to the whole process group, which would also interrupt mpirun. So start mpirun in its own
        # session, and handle Ctrl-C only in this process.
        try:
            command = _expand_mpirun_environment_patterns(self._command, environment)
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
        """Wait until the sshd of every worker accepts connections.

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
                    sys.stderr.write(f"waiting for {len(workers)} workers, at most {_LONGEST_WAIT_SECONDS:g} s: {missing}\n")
                is_announced = True
                self._sleep_unless_stopped(_POLL_SECONDS)

    def _sleep_unless_stopped(self, seconds: float) -> None:
        """Sleep, and raise a `StoppedError` if a stop signal arrives meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(seconds, _POLL_SECONDS / 4))
            self._stop_if_parent_ended()
            if self._stop_requests:
                raise StoppedError(_STOPPED_EARLY)

    def _stop_if_parent_ended(self) -> None:
        """If the parent of this process has ended, stop `mpirun` as if a stop signal had arrived."""
        if self._stop_requests == 0 and os.getppid() != self._parent_id:
            self.handle_stop_signal(signal.SIGTERM, None)


def _run_mpirun(command: Sequence[str]) -> int:
    """Run an `mpirun` command and forward stop signals to it. Return the exit code for this process.

    A `GaudiBertError` is printed to standard error.
    """
    supervisor = _MpirunSupervisor(command)
    with handle_signals((signal.SIGTERM, signal.SIGINT), supervisor.handle_stop_signal):
        try:
            return supervisor.run_until_done()
        except GaudiBertError as error:
            sys.stderr.write(f"error: {error}\n")
            return error.exit_code


# --- the workers of an MPIJob, which may still be starting when their launcher starts

_LONGEST_WAIT_SECONDS = 600.0
_ANSWER_SECONDS = 5.0
_REMOVAL_SECONDS = 5.0
# The MPI operator sets this environment variable to the path of a file that lists the workers, one `host slots=N` per line.
_HOSTFILE = "OMPI_MCA_orte_default_hostfile"


class _Worker(NamedTuple):
    """The name of a host where `mpirun` starts ranks over ssh, and the port of the host's sshd."""

    host: str
    ssh_port: int


def _list_ssh_workers(command: Sequence[str], environment: Mapping[str, str]) -> list[_Worker]:
    """Return the hosts on which `mpirun` starts ranks over ssh. The list is empty if the command does not use ssh."""
    port = re.search(r"-p (\d+)", command[command.index("plm_rsh_args") + 1]) if "plm_rsh_args" in command else None
    hostfile = Path(environment.get(_HOSTFILE, ""))
    if port is None or not hostfile.is_file():
        return []
    lines = hostfile.read_text(encoding="utf-8").splitlines()
    return [_Worker(line.split()[0], int(port[1])) for line in lines if line.strip()]


def _build_rendezvous_variables(workers: Sequence[_Worker], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that tell PyTorch ranks the address and the port to connect to.

    The ranks connect on the first worker, or on this machine if there are no workers. A variable that `environment` already
    contains keeps its value.
    """
    if workers:
        values = {MASTER_ADDRESS: workers[0].host, MASTER_PORT: str(TORCH_PORT)}
    else:
        values = {**ON_THIS_MACHINE, MASTER_PORT: str(find_free_port())}
    return {name: environment.get(name, value) for name, value in values.items()}


def _connection_error(host: str, port: int) -> str | None:
    """Connect to a TCP port. Return the reason if that fails, or None if it succeeds."""
    try:
        socket.create_connection((host, port), _ANSWER_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


# --- the hook of a worker's pod

_RANK = b"\0OMPI_COMM_WORLD_RANK="
# After the ranks on a host have ended, mpirun ends its daemon there within this time.
_DAEMON_SECONDS = 20.0


def _stop_ranks_in_container() -> int:
    """Signal the MPI ranks in this container to save a checkpoint, and wait until they have ended. Return exit code 0.

    There is no timeout here, because Kubernetes ends the hook after the pod's grace period.
    """
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    with_rank = {process for process in processes if _is_mpi_rank(process)}
    # A process that a rank started inherits the rank's environment variables, but is not a rank itself, so leave it out.
    ranks = [process for process in with_rank if _parent_process_id(process) not in with_rank]
    daemons = {_parent_process_id(process) for process in ranks}
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    while any(_is_mpi_rank(process) for process in ranks):
        time.sleep(_POLL_SECONDS / 10)
    # Kubernetes stops sshd when this hook returns. If mpirun's daemon were still running, sshd would kill it, and mpirun
    # would report a lost connection instead of the ranks' exit code. So wait until the daemon has ended.
    until = time.monotonic() + _DAEMON_SECONDS
    while any(_parent_process_id(daemon) for daemon in daemons) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS / 10)
    return 0


def _is_mpi_rank(process_id: int) -> bool:
    """Return whether a process has the environment variables of an MPI rank. Return False if these cannot be read."""
    try:
        return _RANK in b"\0" + Path(f"/proc/{process_id}/environ").read_bytes()
    except OSError:
        return False


def _parent_process_id(process_id: int) -> int:
    """Return the id of a process's parent, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(_stop_ranks_in_container() if sys.argv[1:] == ["here"] else _run_mpirun(sys.argv[1:]))
