"""Find out the rank of this process among several processes, or which part of the work it does, and handle signals.

A launcher such as mpirun sets environment variables that contain the rank of a process.

The option `--shard` divides the work of a command into parts, which several machines do without communicating with each
other (see docs/kubernetes.md#without-a-clusters-runner-many-machines). Its values are:

    K/N      part K of N, from 0
    auto     in a Slurm array, where K counts from SLURM_ARRAY_TASK_MIN and N is SLURM_ARRAY_TASK_COUNT
    auto/N   in an Indexed Job of Kubernetes, where K is JOB_COMPLETION_INDEX

The environment is read only for the last two values, so that a leftover variable never changes what a command does.
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
from typing import NamedTuple

from gaudi_bert.common.errors import InputError

# The launchers that can start several processes. Each sets two environment variables, which contain the rank of the process
# and the number of processes. `mpirun` means Open MPI, which the Gaudi images contain.
LAUNCHERS = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True)
class LauncherInfo:
    """The rank of this process, and the number of processes that a launcher started together.

    Attributes:
        launcher: The name of the launcher.
        rank: The number of this process, from 0.
        size: The number of processes.
    """

    launcher: str
    rank: int
    size: int


def detect_launcher(environment: Mapping[str, str] | None = None) -> LauncherInfo | None:
    """Read the rank of this process from its launcher's environment variables. Return None if no launcher started it.

    Args:
        environment: The environment variables, by default those of this process.

    Raises:
        InputError: The variables contradict each other.
    """
    variables = os.environ if environment is None else environment
    for launcher, rank_name, size_name in LAUNCHERS:
        if rank_name not in variables or size_name not in variables:
            continue
        if launcher == "torchrun" and "MASTER_ADDR" not in variables:
            continue  # other programs use variables of these names too
        rank, size = variables[rank_name], variables[size_name]
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise InputError(
                f"{rank_name}={rank}, {size_name}={size}: the rank must be from 0 to size - 1; unset both, or start the "
                f"command with {launcher}"
            )
        return LauncherInfo(launcher, int(rank), int(size))
    node = detect_training_node(variables)
    return LauncherInfo("Kubernetes", node.rank, node.count) if node is not None and node.processes == 1 else None


@contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle signals with `handler` while the `with` block runs.

    Python allows signal handlers only in the main thread. In other threads, this function does nothing.
    """
    allowed = numbers if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handler) for number in allowed}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def is_first_process() -> bool:
    """Return whether this process is the only or the first one of its run, and should therefore print the results."""
    launch, node = detect_launcher(), detect_training_node()
    return launch.rank == 0 if launch is not None else node is None or node.rank == 0


# --- environment variables for PyTorch processes

# These environment variables contain the address and the port of the first process, to which all processes connect.
MASTER_ADDRESS, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
# Processes on different hosts or in different containers cannot agree on a free port, so they use PyTorch's default port.
TORCH_PORT = 29500
# By default, PyTorch looks up the host name of the machine, which may fail. With these variables, processes on one machine
# connect to each other without a host name.
ON_THIS_MACHINE = {MASTER_ADDRESS: "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def torch_environment(rank: int, size: int, *, processes_per_host: int, address: str, port: int) -> dict[str, str]:
    """Return the environment variables for `torch.distributed` that torchrun would set for one process.

    Args:
        rank: The number of the process, from 0.
        size: The number of processes.
        processes_per_host: The number of processes on each host.
        address: The address of the first process.
        port: The port of the first process.
    """
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % processes_per_host,
        "LOCAL_WORLD_SIZE": processes_per_host,
        MASTER_ADDRESS: address,
        MASTER_PORT: port,
    }
    return {name: str(value) for name, value in values.items()}


@dataclass(frozen=True)
class TrainingNode:
    """One of several nodes (pods) of a training run. Each node runs the same number of ranks.

    Attributes:
        rank: The number of this node, from 0.
        count: The number of nodes.
        processes: The number of ranks on each node.
        address: The address of the first node, to which all ranks connect.
        port: The port on the first node.
    """

    rank: int
    count: int
    processes: int
    address: str
    port: int

    def torch_variables(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables for `torch.distributed` of one rank on this node.

        Args:
            local_rank: The number of the rank on this node, from 0.
        """
        rank, size = self.rank * self.processes + local_rank, self.count * self.processes
        return torch_environment(rank, size, processes_per_host=self.processes, address=self.address, port=self.port)


# Our Kubernetes Jobs and Kubeflow Trainer set these environment variables in a pod. torchrun accepts them in place of its
# options.
NODE_VARIABLES = ("PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MASTER_PORT")
NODE_ADDRESS = "PET_MASTER_ADDR"


def detect_training_node(environment: Mapping[str, str] | None = None) -> TrainingNode | None:
    """Read the environment variables of this process's pod, and return the node on which this process must start ranks.

    Return None if there are no such variables, or if this process itself is one of the ranks.

    Args:
        environment: The environment variables, by default those of this process.

    Raises:
        InputError: A variable is missing or is not a valid number.
    """
    variables = os.environ if environment is None else environment
    if NODE_ADDRESS not in variables or NODE_VARIABLES[0] not in variables or "RANK" in variables:
        return None
    values = [variables.get(name, "") for name in NODE_VARIABLES]
    if not all(value.isdecimal() for value in values) or not int(values[0]) < int(values[1]) or not int(values[2]):
        shown = ", ".join(f"{name}={value}" for name, value in zip(NODE_VARIABLES, values, strict=True))
        raise InputError(
            f"{shown}: must be the rank of this node, the number of nodes, the number of processes per node, and a port; "
            "correct the variables"
        )
    rank, count, processes, port = map(int, values)
    return TrainingNode(rank, count, processes, variables[NODE_ADDRESS], port)


def processes_share_folders() -> bool:
    """Return whether all processes of the run have access to the same folders.

    This is the case if there is only one process, or if the processes run in pods, which mount the same volume.
    """
    return detect_launcher() is None or NODE_ADDRESS in os.environ


def find_free_port() -> int:
    """Return the number of a port on this machine that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- parts

_SLURM_ID, _SLURM_FIRST, _SLURM_LAST = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX"
_SLURM_COUNT, _SLURM_STEP = "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_STEP"
_JOB_INDEX = "JOB_COMPLETION_INDEX"


class WorkPart(NamedTuple):
    """The number of the part that a process works on, from 0, and the total number of parts."""

    number: int
    parts: int


def parse_shard_option(option: str, environment: Mapping[str, str] | None = None) -> WorkPart:
    """Parse a value of the option `--shard`, which is `K/N`, `auto` or `auto/N`.

    Args:
        option: The value of `--shard`.
        environment: The environment variables for `auto`. By default, they are those of this process.

    Raises:
        InputError: The value is invalid, or a variable for `auto` is missing or invalid.
    """
    variables = os.environ if environment is None else environment
    if option == "auto":
        return _parse_slurm_array_variables(variables)
    match = re.fullmatch(r"(\d{1,9}|auto)/(\d{1,9})", option, re.ASCII)
    if match is None:
        raise InputError(f"--shard {option}: must be K/N with K from 0 to N - 1, for example 0/4, or auto or auto/N")
    number = _parse_variable(option, variables, _JOB_INDEX, "an Indexed Job") if match[1] == "auto" else int(match[1])
    if number >= int(match[2]):
        found = f", but {_JOB_INDEX} is {number}" if match[1] == "auto" else ""
        raise InputError(f"--shard {option}: K must be from 0 to N - 1{found}; pass for example 0/4")
    return WorkPart(number, int(match[2]))


def _parse_slurm_array_variables(variables: Mapping[str, str]) -> WorkPart:
    """Return the part that this task of a Slurm job array works on. The tasks must be numbered without gaps."""
    if _SLURM_ID not in variables and _JOB_INDEX in variables:
        raise InputError("--shard auto: the environment of an Indexed Job does not contain the number of pods; pass auto/N")
    task, first, last, count = (
        _parse_variable("auto", variables, name, "a Slurm array (sbatch --array=0-7)")
        for name in (_SLURM_ID, _SLURM_FIRST, _SLURM_LAST, _SLURM_COUNT)
    )
    step = _parse_variable("auto", variables, _SLURM_STEP, "a Slurm array") if _SLURM_STEP in variables else 1
    if step != 1 or last - first + 1 != count:
        raise InputError(
            f"--shard auto: the {count} tasks of this job array are numbered {first} to {last} in steps of {step}; use "
            "an array without gaps, or pass K/N"
        )
    if not first <= task <= last:
        raise InputError(f"--shard auto: {_SLURM_ID} is {task}, but the array goes from {first} to {last}; pass K/N")
    return WorkPart(task - first, count)


def _parse_variable(shard: str, variables: Mapping[str, str], name: str, scheduler: str) -> int:
    """Return the value of a scheduler's environment variable as an integer.

    Args:
        shard: The value of `--shard`, for messages.
        variables: The environment variables.
        name: The name of the variable.
        scheduler: The name of the scheduler, for messages.

    Raises:
        InputError: The variable is not set, or is not an integer.
    """
    value = variables.get(name)
    if value is None:
        raise InputError(f"--shard {shard}: {name} is not set, so this process is not part of {scheduler}; pass K/N")
    if re.fullmatch(r"\d{1,9}", value, re.ASCII) is None:
        raise InputError(f"--shard {shard}: {name} is {value!r}, which is not an integer; pass K/N")
    return int(value)
