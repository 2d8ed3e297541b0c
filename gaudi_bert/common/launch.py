"""Which of several processes or parts this is, by a launcher, a scheduler or `--shard`; what PyTorch reads; signals.

Parts (see docs/kubernetes.md#without-a-clusters-runner-many-machines):

    K/N      part K, from 0
    auto     Slurm's array: K counts from SLURM_ARRAY_TASK_MIN, N is SLURM_ARRAY_TASK_COUNT
    auto/N   an Indexed Job of Kubernetes: K is JOB_COMPLETION_INDEX

The environment is read for the last two only, so that a stale variable never changes what a command does.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from gaudi_bert.common.errors import InputError

# Launcher, and where it puts a process's number and how many there are. Open MPI's is what the Gaudi images have.
LAUNCHERS = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True)
class Launch:
    """A process among those that were started together: its number, from 0, and how many they are."""

    launcher: str
    rank: int
    size: int


def find_launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Return what a launcher set in `environment` (default: this process's); None without one."""
    variables = os.environ if environment is None else environment
    for launcher, rank_name, size_name in LAUNCHERS:
        if rank_name not in variables or size_name not in variables:
            continue
        if launcher == "torchrun" and "MASTER_ADDR" not in variables:
            continue  # other programs have variables of these names
        rank, size = variables[rank_name], variables[size_name]
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise InputError(f"{rank_name}={rank}, {size_name}={size}: not 0 <= rank < size; unset both, or use {launcher}")
        return Launch(launcher, int(rank), int(size))
    node = find_node(variables)
    return Launch("Kubernetes", node.rank, node.count) if node is not None and node.processes == 1 else None


@contextmanager
def handled_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """While the context lasts, `handler` takes these signals; in the main thread only, as Python has it."""
    allowed = numbers if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handler) for number in allowed}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def is_first_process() -> bool:
    """Whether this process prints the result of what all processes of a launcher did together; true without a launcher."""
    launch, node = find_launch(), find_node()
    return launch.rank == 0 if launch is not None else node is None or node.rank == 0


# --- the variables of PyTorch's processes

# Where they meet: an address and a port of the first of them.
MASTER_ADDRESS, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
# PyTorch's own default, for processes on hosts or in containers of their own.
TORCH_PORT = 29500
# Processes of one machine need no name of it that can be resolved.
ON_THIS_MACHINE = {MASTER_ADDRESS: "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def torch_environment(rank: int, size: int, *, per_host: int, address: str, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for `torch.distributed`; the first process listens at `address`."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % per_host,
        "LOCAL_WORLD_SIZE": per_host,
        MASTER_ADDRESS: address,
        MASTER_PORT: port,
    }
    return {name: str(value) for name, value in values.items()}


@dataclass(frozen=True)
class Node:
    """Which of several nodes (pods) this is, from 0, how many ranks each starts, and where all of them meet."""

    rank: int
    count: int
    processes: int
    address: str
    port: int

    def variables(self, local_rank: int) -> dict[str, str]:
        """The variables of one of this node's ranks."""
        rank, size = self.rank * self.processes + local_rank, self.count * self.processes
        return torch_environment(rank, size, per_host=self.processes, address=self.address, port=self.port)


# What our Jobs and Kubeflow Trainer tell a pod: those that torchrun, too, takes for its options.
NODE_VARIABLES = ("PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_PORT")
NODE_ADDRESS = "PET_MASTER_ADDR"


def find_node(environment: Mapping[str, str] | None = None) -> Node | None:
    """The node that this process is alone on, so that it starts the ranks there or is the only one; None for a rank."""
    variables = os.environ if environment is None else environment
    if NODE_ADDRESS not in variables or NODE_VARIABLES[0] not in variables or "RANK" in variables:
        return None
    values = [variables.get(name, "") for name in NODE_VARIABLES]
    if not all(value.isdecimal() for value in values) or not int(values[0]) < int(values[1]) or not int(values[2]):
        shown = ", ".join(f"{name}={value}" for name, value in zip(NODE_VARIABLES, values, strict=True))
        raise InputError(f"{shown}: not the numbers of a node, of nodes, of processes and of a port; correct the pod")
    rank, count, processes, port = map(int, values)
    return Node(rank, count, processes, variables[NODE_ADDRESS], port)


def shares_folders() -> bool:
    """Whether every process of the launch sees the files of all: it is alone, or in pods, which mount the same volume."""
    return find_launch() is None or NODE_ADDRESS in os.environ


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- parts

_SLURM_ID, _SLURM_FIRST, _SLURM_LAST = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX"
_SLURM_COUNT, _SLURM_STEP = "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_STEP"
_JOB_INDEX = "JOB_COMPLETION_INDEX"


def parse_part(text: str, environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """`K/N`, `auto` or `auto/N` as (K, N), with 0 <= K < N; the variables are by default those of this process."""
    variables = os.environ if environment is None else environment
    if text == "auto":
        return _slurm_part(variables)
    match = re.fullmatch(r"(\d{1,9}|auto)/(\d{1,9})", text, re.ASCII)
    if match is None:
        raise InputError(f"--shard {text}: write K/N with K from 0 to N - 1, for example 0/4; or auto, or auto/N")
    number = _number(text, variables, _JOB_INDEX, "an Indexed Job") if match[1] == "auto" else int(match[1])
    if number >= int(match[2]):
        where = f"{_JOB_INDEX} is {number}, " if match[1] == "auto" else ""
        raise InputError(f"--shard {text}: {where}write K/N with K from 0 to N - 1, for example 0/4")
    return number, int(match[2])


def _slurm_part(variables: Mapping[str, str]) -> tuple[int, int]:
    """The part of one task of a Slurm array whose numbers follow one another."""
    if _SLURM_ID not in variables and _JOB_INDEX in variables:
        raise InputError("--shard auto: an Indexed Job does not say how many pods it has; write auto/N")
    task, first, last, count = (
        _number("auto", variables, name, "a Slurm array (sbatch --array=0-7)")
        for name in (_SLURM_ID, _SLURM_FIRST, _SLURM_LAST, _SLURM_COUNT)
    )
    step = _number("auto", variables, _SLURM_STEP, "a Slurm array") if _SLURM_STEP in variables else 1
    if step != 1 or last - first + 1 != count:
        tasks = f"the {count} tasks of this array go from {first} to {last} in steps of {step}"
        raise InputError(f"--shard auto: {tasks}; use an array without gaps, or write K/N")
    if not first <= task <= last:
        raise InputError(f"--shard auto: {_SLURM_ID} is {task}, and the array goes from {first} to {last}; write K/N")
    return task - first, count


def _number(text: str, variables: Mapping[str, str], name: str, where: str) -> int:
    value = variables.get(name)
    if value is None:
        raise InputError(f"--shard {text}: {name} is not set, so this is not part of {where}; write K/N")
    if re.fullmatch(r"\d{1,9}", value, re.ASCII) is None:
        raise InputError(f"--shard {text}: {name} is {value!r}, not an integer; write K/N")
    return int(value)
