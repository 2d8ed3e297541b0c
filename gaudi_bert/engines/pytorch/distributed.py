"""Connecting processes with torch.distributed: Gloo between CPUs, NCCL between GPUs, HCCL between Gaudi cards.

The processes are started by torchrun, by mpirun, or by our own launchers. Gradients are merged into buffers of at most
`training.fusion_bytes`, and summed in a fixed order. Small arrays on the host are summed as float64 by Gloo, even if the
processes compute on GPUs or Gaudi cards.
"""

from __future__ import annotations

import atexit
import importlib
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as torch_distributed
from torch.nn import Parameter

from gaudi_bert.common.arrays import FloatArray, WeightArrays
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.launch import MASTER_ADDRESS, MASTER_PORT, LauncherInfo, detect_launcher, detect_training_node
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.protocol import Communicator, DeviceKind
from gaudi_bert.engines.watchdog import SLOW_WORK_FACTOR, ConnectedProcess, Watchdog, collect_values_that_must_agree

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "hpu": "hccl"}
_FIRST_PORT, _PORTS = 20_000, 12_000


@dataclass(frozen=True)
class TorchCommunicator(ConnectedProcess):
    """The communicator of a process in a run that connects its processes with torch.distributed.

    Attributes:
        host_group: The process group for arrays on the host. None for the default group.
    """

    host_group: Any = None

    def sum_array(self, values: NDArray[Any]) -> FloatArray:
        """Return the sum of a small array in host memory over all processes, as float64."""
        self.record_waiting_for_others()
        tensor = torch.from_numpy(np.array(values, np.float64))
        torch_distributed.all_reduce(tensor, group=self.host_group)
        array: FloatArray = tensor.numpy()
        return array

    def broadcast(self, arrays: WeightArrays) -> WeightArrays:
        """Return the arrays of rank 0 in every process."""
        self.record_waiting_for_others()
        shared = {}
        for name, array in arrays.items():
            tensor = torch.from_numpy(np.array(array))
            torch_distributed.broadcast(tensor, 0, group=self.host_group)
            shared[name] = tensor.numpy()
        return shared


class GradientReducer:
    """Sums gradients over all processes. The sums begin during the last backward pass of an update, so that communication
    and computation overlap.

    Gradients are divided into buckets, and the gradients of a bucket are merged into one buffer. Every process sends the
    buckets in the same order, beginning with the last bucket, so that the order of the sums does not depend on timing. With
    Gloo, the sums are bit-identical to sums without overlap. With NCCL and HCCL, they are bit-identical if the backend sums
    deterministically.

    Args:
        parameters: The parameters of the model.
        bucket_bytes: The maximum size of a bucket in bytes. A larger gradient is a bucket by itself.
    """

    def __init__(self, parameters: Sequence[Parameter], bucket_bytes: int) -> None:
        self._buckets = [*_split_into_buckets(parameters, bucket_bytes)][::-1]
        self._bucket_index = {id(parameter): number for number, bucket in enumerate(self._buckets) for parameter in bucket}
        self._missing: list[int] = []
        self._sent: list[tuple[Tensor, Any]] = []
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._count_computed_gradient)

    def prepare_last_backward_pass(self) -> None:
        """Prepare for the last backward pass of an update, which sends gradients as soon as it has computed them.

        Earlier passes of the update only add to the gradients.
        """
        self._missing = [sum(parameter.requires_grad for parameter in bucket) for bucket in self._buckets]

    def _count_computed_gradient(self, parameter: Tensor) -> None:
        """Record that a backward pass has computed the gradient of a parameter. In the last pass, send every complete
        bucket, which is a list of parameters with their gradients.

        The buckets are sent in their fixed order.
        """
        if not self._missing:
            return
        self._missing[self._bucket_index[id(parameter)]] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
            self._start_next_sum()

    def _start_next_sum(self) -> None:
        """Start summing the gradients of the next bucket, which is a list of parameters, over all processes. Do not wait for
        the result.
        """
        bucket = self._buckets[len(self._sent)]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
        merged = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter in bucket:
            parameter.grad = None  # frees the memory during the sum
        self._sent.append((merged, torch_distributed.all_reduce(merged, async_op=True)))

    def wait_for_sums(self) -> None:
        """Wait until all gradients have been summed over the processes, and store the sums as the gradients of the
        parameters.
        """
        while len(self._sent) < len(self._buckets):  # buckets with a parameter that the loss does not depend on
            self._start_next_sum()
        for bucket, (merged, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            for parameter, total in zip(bucket, merged.split([each.numel() for each in bucket]), strict=True):
                parameter.grad = total.reshape(parameter.shape)
        self._missing, self._sent = [], []


def _split_into_buckets(parameters: Sequence[Parameter], max_bytes: int) -> Iterator[list[Parameter]]:
    """Divide parameters into consecutive lists of at most `max_bytes` bytes. A larger parameter gets a list of its own."""
    bucket: list[Parameter] = []
    size = 0
    for parameter in parameters:
        parameter_bytes = parameter.numel() * parameter.element_size()
        if bucket and size + parameter_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter_bytes
    yield bucket


def connect_processes(device: DeviceKind, settings: LoopSettings, facts: Mapping[str, Any]) -> Communicator:
    """Connect the processes that a launcher started, and return the communicator of this process. Without a launcher, the
    run has only this process.

    Args:
        device: The kind of device of every process.
        settings: The settings of the training loop.
        facts: Values that must be equal in all processes.

    Raises:
        InputError: The launcher was used wrongly, or the port is in use.
        FailedError: The processes cannot connect.
    """
    node = detect_training_node()
    if node is not None and node.processes == 1:
        os.environ.update(node.torch_variables(0))
    launch = detect_launcher()
    if launch is None or launch.size == 1:
        return Communicator()
    process_name = f"rank {launch.rank} of {launch.size}, started by {launch.launcher}"
    local_size = _read_first_numeric_variable(
        _LOCAL_SIZE_VARIABLES, launch.size
    )  # if the launcher does not set a variable, all processes are on this host
    _set_rendezvous_address(launch, local_size, process_name)
    if device == "hpu":
        # Importing this module registers HCCL, the communication library for Gaudi cards. HCCL reads from environment
        # variables which card this process uses, but only torchrun and mpirun set these variables. If another launcher
        # started the process, pass the number of the card.
        hccl = importlib.import_module("habana_frameworks.torch.distributed.hccl")
        if not any(all(name in os.environ for name in names) for names in _VARIABLES_OF_HCCL):
            hccl.initialize_distributed_hpu(world_size=launch.size, rank=launch.rank, local_rank=find_local_rank())
    timeout = timedelta(seconds=SLOW_WORK_FACTOR * settings.stall_seconds)
    try:
        if not torch_distributed.is_initialized():
            with Watchdog(f"rank {launch.rank} of {launch.size}", settings.stall_seconds) as watchdog:
                store = rendezvous(launch, settings.meeting_seconds, watchdog)
                torch_distributed.init_process_group(
                    _BACKENDS[device], store=store, rank=launch.rank, world_size=launch.size, timeout=timeout
                )
            # Threads of the process group that still run when the interpreter exits would sometimes abort the process, so
            # destroy the group first.
            atexit.register(_destroy_process_group)
        host_group = None if device == "cpu" else torch_distributed.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise FailedError(
            f"{process_name}: torch.distributed cannot connect the processes ({reason}); start all ranks again"
        ) from error
    facts = {"torch": torch.__version__, "device": device, **collect_values_that_must_agree(settings, facts)}
    return TorchCommunicator(launch.rank, launch.size, local_size, facts=facts, host_group=host_group)


def _destroy_process_group() -> None:
    """Destroy the process group."""
    if torch_distributed.is_initialized():
        with suppress(RuntimeError):  # the other processes may have ended
            torch_distributed.destroy_process_group()


_VARIABLES_OF_HCCL = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
_LOCAL_SIZE_VARIABLES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS")
_LOCAL_RANK_VARIABLES = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", "MPI_LOCALRANKID")


def find_local_rank() -> int:
    """Return the number of this process on its host, from 0. It is also the number of the card that the process uses."""
    launch = detect_launcher()
    return _read_first_numeric_variable(_LOCAL_RANK_VARIABLES, launch.rank if launch is not None else 0)


def _read_first_numeric_variable(names: Sequence[str], default: int) -> int:
    """Return the value of the first environment variable that contains a number. If none does, return the default."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), default)


def _set_rendezvous_address(launch: LauncherInfo, local_size: int, process_name: str) -> None:
    """Set MASTER_ADDR and MASTER_PORT to the address of rank 0, unless these environment variables are already set.

    Raises:
        InputError: There are several hosts, so that the address must be given.
    """
    if "MASTER_ADDR" not in os.environ:
        if local_size != launch.size:
            raise InputError(
                f"{process_name}: the processes run on several hosts, but MASTER_ADDR is not set; set it to the name of the "
                "first host, for example with mpirun -x MASTER_ADDR=host-0"
            )
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # If two runs on a host used the same port, their processes would connect to each other. Therefore derive the port from
    # the identifier that the launcher gives to a run.
    job = os.environ.get("PMIX_NAMESPACE", os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", ""))
    os.environ.setdefault("MASTER_PORT", str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS))


# --- The rendezvous of the processes: rank 0 listens, and the others connect to it
#
# The rendezvous of torch.distributed ignores signals while it waits, and does not report which processes are missing.
# Therefore it is implemented here.

_POLL_SECONDS = 0.2
# A wait for other processes is reported to the user only if it lasts longer than this.
_QUIET_SECONDS = 5.0
_CONNECT_SECONDS = 10.0


def _wait_until_no_obstacle(
    process_name: str, watchdog: Watchdog, describe_obstacle: Callable[[], str | None], max_seconds: float
) -> None:
    """Wait until `describe_obstacle()` returns None. If the wait is long, show the obstacle to the user once.

    Args:
        process_name: The name of this process.
        watchdog: Receives regular reports that this process makes progress.
        describe_obstacle: Returns what this process still waits for, or None if it need not wait.
        max_seconds: The maximum time to wait.

    Raises:
        FailedError: There is still an obstacle after `max_seconds`.
    """
    began, is_reported = time.monotonic(), False
    while (obstacle := describe_obstacle()) is not None:
        watchdog.record_progress()
        waited = time.monotonic() - began
        if waited >= max_seconds:
            raise FailedError(f"{process_name}: {obstacle} within {max_seconds:g} s; run the same command again")
        if waited >= _QUIET_SECONDS and not is_reported:
            is_reported = True
            Reporter().say(f"{process_name} is waiting for at most {max_seconds:g} s: {obstacle}")
        time.sleep(_POLL_SECONDS)


def rendezvous(launch: LauncherInfo, max_seconds: float, watchdog: Watchdog) -> Any:
    """Wait until all processes of a launch have connected to rank 0, and return the key-value store that they share.

    Args:
        launch: The launch, and the rank of this process in it.
        max_seconds: The maximum time to wait.
        watchdog: Watches this process.

    Returns:
        The torch.distributed store that all processes share.

    Raises:
        FailedError: A process does not connect within `max_seconds`, or is lost.
        InputError: The port is already in use, so that rank 0 cannot listen.
    """
    watchdog.record_activity("the rendezvous", slow=False)
    process_name, host, port = (
        f"rank {launch.rank} of {launch.size}",
        os.environ[MASTER_ADDRESS],
        int(os.environ[MASTER_PORT]),
    )

    def describe_missing_ranks() -> str | None:
        """Return which ranks have not connected yet, or None if all ranks have connected."""
        ranks = [str(rank) for rank in range(launch.size) if not store.check([f"here/{rank}"])]
        shown = f"{', '.join(ranks[:8])}{', ...' if len(ranks) > 8 else ''}"
        return f"rank{'s' if len(ranks) > 1 else ''} {shown} did not connect" if ranks else None

    try:
        store = _open_store(launch, max_seconds, watchdog, host, port)
        store.set(f"here/{launch.rank}", "")
        _wait_until_no_obstacle(process_name, watchdog, describe_missing_ranks, max_seconds)
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        if "EADDRINUSE" in reason:
            raise InputError(
                f"{process_name}: {MASTER_PORT} = {port} is already in use; set another port in all processes"
            ) from error
        raise FailedError(
            f"{process_name}: lost the connection to another process at {host}:{port} ({reason}); run the same command again"
        ) from error
    return store


def _open_store(launch: LauncherInfo, max_seconds: float, watchdog: Watchdog, host: str, port: int) -> Any:
    """Open and return the key-value store of torch.distributed. Rank 0 hosts the store, unless torchrun already does."""

    def describe_connection_failure() -> str | None:
        """Return why rank 0 cannot be reached, or None if it accepts connections."""
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            return f"rank 0 does not answer at {host}:{port} ({error.strerror or error})"
        return None

    listens = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not listens:
        _wait_until_no_obstacle(f"rank {launch.rank} of {launch.size}", watchdog, describe_connection_failure, max_seconds)
    else:
        # Rank 0 runs the store, so it can also reach the store at the loopback address. But torch looks up the host name of
        # that address, which ends in a time-out if there is no name server. Therefore use the loopback address only if rank
        # 0 cannot resolve its own name.
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            host = "127.0.0.1"
    limit = timedelta(seconds=max_seconds)
    store = torch_distributed.TCPStore(host, port, launch.size, listens, timeout=limit, wait_for_workers=False)
    return torch_distributed.PrefixStore(f"gaudi-bert/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
