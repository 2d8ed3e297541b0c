"""Training processes on this machine: one command, started several times, that find each other by Horovod.

On CPUs they meet through Gloo: this process keeps their addresses (`rendezvous.py`) and gives each its number
in the environment, as `horovodrun --gloo` does. `horovodrun` itself is not used: it kills all processes five seconds after a
signal, before a checkpoint may be whole, and turns every exit code into 1 and a traceback. With cards, `mpirun` starts them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType

from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.mpirun import training_command
from gaudi_bert.runners.rendezvous import RendezvousServer

__all__ = ["run_training_processes"]

# Long enough for the watchdog of the others to name who failed, and to end them.
GRACE_SECONDS = 10.0
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class _End:
    """How a process ended: its exit code (negative: the signal), and whether it was killed here, after others had failed."""

    process_id: int
    code: int
    killed_by_us: bool


def run_training_processes(settings: PipelineSettings, stage: str, command: Sequence[str]) -> None:
    """Run `command` once for each training process of the pipeline, on this machine; their standard error is ours.

    Args:
        settings: `resources` says how many there are.
        stage: what they do, for messages: `train` or `finetune`.
        command: of one process; its standard output is dropped.

    Raises:
        InputError: Horovod is missing, or the processes said that their input is bad.
        FailedError: a process failed.
        StoppedError: stopped on request, after a checkpoint was saved.
    """
    processes = settings.resources.workers * settings.resources.processes_per_worker
    if settings.resources.cards:
        command = training_command(settings, list(command), over_ssh=False, python=sys.executable)
        ends = _run_all([command], [dict(os.environ)])
        _check_ends(stage, ends, ["mpirun"])
    else:
        with _rendezvous_environments(processes) as environments:
            ends = _run_all([command] * processes, environments)
        _check_ends(stage, ends, [f"rank {rank} of {processes}" for rank in range(processes)])


def _check_ends(stage: str, ends: Sequence[_End], names: Sequence[str]) -> None:
    """Raise the error that processes ended with; `names` are theirs."""
    code = next((end.code for end in ends if end.code > 0), 0)
    if code == StoppedError.exit_code:
        raise StoppedError(f"{stage}: stopped on request; the same command goes on")
    # A process that is killed can say nothing, so this one does.
    killed = [
        f"{name} (process {end.process_id}) was killed by {signal.Signals(-end.code).name}"
        for name, end in zip(names, ends, strict=True)
        if end.code < 0 and not end.killed_by_us
    ]
    if code:
        kind = InputError if code == InputError.exit_code else FailedError
        raise kind(
            "; ".join([f"{stage}: one of {len(ends)} processes ended with exit code {code}; it says why above", *killed])
        )
    if killed:
        raise FailedError(
            f"{stage}: {'; '.join(killed)}; where nobody did it, memory was short (see dmesg); "
            "the same command goes on from the last checkpoint"
        )
    if any(end.code for end in ends):
        raise FailedError(f"{stage}: a process did not end after the others had, and was killed; the same command goes on")


@contextmanager
def _rendezvous_environments(processes: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each process; while the context lasts, they can find each other."""
    if find_spec("horovod") is None:
        raise InputError(
            f"resources.workers: {processes} processes need Horovod, which is not installed; "
            "run `make setup-horovod`, or set resources.workers to 1"
        )
    with RendezvousServer(("127.0.0.1", 0)) as server:
        threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
        yield [{**os.environ, **_environment(rank, processes, server.server_address[1])} for rank in range(processes)]
        server.shutdown()


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What Horovod reads of the variables that `horovodrun` sets."""
    values = {
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": processes,
        "HOROVOD_LOCAL_RANK": rank,
        "HOROVOD_LOCAL_SIZE": processes,
        "HOROVOD_CROSS_RANK": 0,
        "HOROVOD_CROSS_SIZE": 1,
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}


def _run_all(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> list[_End]:
    """Run all until they end. After a failure, the others have `GRACE_SECONDS` to say what they know."""
    running: list[subprocess.Popen[bytes]] = []
    with _forwarded_signals(running):
        for command, environment in zip(commands, environments, strict=True):
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True))
        deadline, killed = float("inf"), set()
        while None in (codes := [process.poll() for process in running]):
            if deadline == float("inf") and any(codes):
                deadline = time.monotonic() + GRACE_SECONDS
            if time.monotonic() > deadline:
                killed |= {process.pid for process in running if process.poll() is None}
                for process in running:
                    process.kill()
            time.sleep(POLL_SECONDS)
    return [_End(process.pid, process.wait(), process.pid in killed) for process in running]


@contextmanager
def _forwarded_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """While the context lasts, SIGTERM and Ctrl-C go to `processes`, which save and stop; this process waits for them."""

    def forward(number: int, frame: FrameType | None) -> None:
        print("stopping: the training processes save and end", file=sys.stderr)  # noqa: T201
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
