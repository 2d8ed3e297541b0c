"""Several processes by torch.distributed: Gloo between CPUs, NCCL between GPUs, HCCL between Gaudi cards.

Started by torchrun, by mpirun, or by our own launchers. Gradients travel in merged buffers of at most
`training.fusion_bytes`, in a fixed order; small host arrays travel as float64 through a group of CPUs, whatever the device.
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
from gaudi_bert.common.launch import MASTER_ADDRESS, MASTER_PORT, Launch, find_launch, find_node
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.protocol import Communicator, DeviceKind
from gaudi_bert.engines.watchdog import SLOW_WORK_FACTOR, ConnectedProcess, Watchdog, shared_facts

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "hpu": "hccl"}
_FIRST_PORT, _PORTS = 20_000, 12_000


@dataclass(frozen=True)
class TorchCommunicator(ConnectedProcess):
    """One of several processes; `host_group` connects their CPUs."""

    host_group: Any = None

    def sum_array(self, values: NDArray[Any]) -> FloatArray:
        """The sum over all processes of a small host array (float64)."""
        self.arrive()
        tensor = torch.from_numpy(np.array(values, np.float64))
        torch_distributed.all_reduce(tensor, group=self.host_group)
        array: FloatArray = tensor.numpy()
        return array

    def broadcast(self, arrays: WeightArrays) -> WeightArrays:
        """The arrays of rank 0, in every process; names and shapes are the same in all."""
        self.arrive()
        shared = {}
        for name, array in arrays.items():
            tensor = torch.from_numpy(np.array(array))
            torch_distributed.broadcast(tensor, 0, group=self.host_group)
            shared[name] = tensor.numpy()
        return shared


class GradientSums:
    """Sums of gradients over processes, which begin while the last backward pass of an update still runs.

    Gradients travel in parts of at most `part_bytes`, each merged into one buffer; the last part is sent first, in every
    process: what is added up, and in which order, does not depend on time. Gloo gives the same bits as without overlap; NCCL
    and HCCL do where their own sums are deterministic.
    """

    def __init__(self, parameters: Sequence[Parameter], part_bytes: int) -> None:
        self._parts = [*_parts(parameters, part_bytes)][::-1]
        self._part_of = {id(parameter): number for number, part in enumerate(self._parts) for parameter in part}
        self._missing: list[int] = []
        self._sent: list[tuple[Tensor, Any]] = []
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._add)

    def begin(self) -> None:
        """The next backward pass is the last one of the update: gradients that are complete are sent."""
        self._missing = [sum(parameter.requires_grad for parameter in part) for part in self._parts]

    def _add(self, parameter: Tensor) -> None:
        """A gradient is complete, if this is the last pass; then the parts that are complete are sent, in their order."""
        if not self._missing:
            return
        self._missing[self._part_of[id(parameter)]] -= 1
        while len(self._sent) < len(self._parts) and self._missing[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        part = self._parts[len(self._sent)]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in part]
        merged = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter in part:
            parameter.grad = None  # their memory is free while the buffers travel
        self._sent.append((merged, torch_distributed.all_reduce(merged, async_op=True)))

    def finish(self) -> None:
        """Wait for the sums, which become the gradients of the parameters."""
        while len(self._sent) < len(self._parts):  # a parameter that the loss does not need has no gradient
            self._send()
        for part, (merged, work) in zip(self._parts, self._sent, strict=True):
            work.wait()
            for parameter, total in zip(part, merged.split([each.numel() for each in part]), strict=True):
                parameter.grad = total.reshape(parameter.shape)
        self._missing, self._sent = [], []


def _parts(tensors: Sequence[Parameter], most_bytes: int) -> Iterator[list[Parameter]]:
    """The tensors in their order, in parts of at most so many bytes; a larger one is a part by itself."""
    part: list[Parameter] = []
    size = 0
    for tensor in tensors:
        own = tensor.numel() * tensor.element_size()
        if part and size + own > most_bytes:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += own
    yield part


def connect(device: DeviceKind, settings: LoopSettings, facts: Mapping[str, Any]) -> Communicator:
    """The communicator of all processes of this launch, each on such a device; without a launcher, of this one alone."""
    node = find_node()
    if node is not None and node.processes == 1:
        os.environ.update(node.torch_variables(0))
    launch = find_launch()
    if launch is None or launch.size == 1:
        return Communicator()
    who = f"rank {launch.rank} of {launch.size}, started by {launch.launcher}"
    local_size = _first_number(_LOCAL_SIZES, launch.size)  # all of them, where the launcher does not say
    _set_address(launch, local_size, who)
    if device == "hpu":
        # Registers the backend, which takes the card of this process from the variables that torchrun and mpirun set.
        hccl = importlib.import_module("habana_frameworks.torch.distributed.hccl")
        if not any(all(name in os.environ for name in names) for names in _KNOWN_TO_HCCL):
            hccl.initialize_distributed_hpu(world_size=launch.size, rank=launch.rank, local_rank=local_rank())
    timeout = timedelta(seconds=SLOW_WORK_FACTOR * settings.stall_seconds)
    try:
        if not torch_distributed.is_initialized():
            with Watchdog(f"rank {launch.rank} of {launch.size}", settings.stall_seconds) as watchdog:
                store = meet(launch, settings.meeting_seconds, watchdog)
                torch_distributed.init_process_group(
                    _BACKENDS[device], store=store, rank=launch.rank, world_size=launch.size, timeout=timeout
                )
            # Its threads would otherwise be torn down with the interpreter, which now and then aborts the process.
            atexit.register(_part)
        host_group = None if device == "cpu" else torch_distributed.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise FailedError(f"{who}: torch.distributed cannot connect ({reason}); start all ranks again") from error
    facts = {"torch": torch.__version__, "device": device, **shared_facts(settings, facts)}
    return TorchCommunicator(launch.rank, launch.size, local_size, facts=facts, host_group=host_group)


def _part() -> None:
    if torch_distributed.is_initialized():
        with suppress(RuntimeError):  # the others may be gone
            torch_distributed.destroy_process_group()


_KNOWN_TO_HCCL = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS")
_LOCAL_RANKS = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", "MPI_LOCALRANKID")


def local_rank() -> int:
    """The number of this process among those on its host: that of its card."""
    launch = find_launch()
    return _first_number(_LOCAL_RANKS, launch.rank if launch is not None else 0)


def _first_number(names: Sequence[str], default: int) -> int:
    """The first of these variables that is a number."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), default)


def _set_address(launch: Launch, local_size: int, who: str) -> None:
    """Set the address where rank 0 listens, unless the launcher names it; on one host it is this one."""
    if "MASTER_ADDR" not in os.environ:
        if local_size != launch.size:
            raise InputError(
                f"{who}: the processes are on several hosts, and MASTER_ADDR is not set; give the name of the first host, "
                "for example mpirun -x MASTER_ADDR=host-0"
            )
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Ranks of one launch share its number, so that two launches on a host do not meet.
    job = os.environ.get("PMIX_NAMESPACE", os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", ""))
    os.environ.setdefault("MASTER_PORT", str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS))


# --- How the processes of a launch meet before they compute: rank 0 listens, and the others find it
#
# torch's own meeting hears no signal, and names nobody who does not come. So processes look for one another here.

_POLL_SECONDS = 0.2
# What passes sooner is not reported.
_QUIET_SECONDS = 5.0
_CONNECT_SECONDS = 10.0


def _wait(who: str, watchdog: Watchdog, reason: Callable[[], str | None], seconds: float) -> None:
    """Return when `reason` is None; a reason is reported once, and ends the run after `seconds`."""
    began, is_reported = time.monotonic(), False
    while (because := reason()) is not None:
        watchdog.moved()
        waited = time.monotonic() - began
        if waited >= seconds:
            raise FailedError(f"{who}: {because}, after {seconds:g} s; the same command tries again")
        if waited >= _QUIET_SECONDS and not is_reported:
            is_reported = True
            Reporter().say(f"{who} waits, at most {seconds:g} s: {because}")
        time.sleep(_POLL_SECONDS)


def meet(launch: Launch, seconds: float, watchdog: Watchdog) -> Any:
    """Return the store by which all processes of the launch continue, once all are there.

    Raises:
        FailedError: a process does not come within `seconds`, or is lost.
        InputError: rank 0 cannot listen.
    """
    watchdog.note("the meeting", slow=False)
    who, host, port = f"rank {launch.rank} of {launch.size}", os.environ[MASTER_ADDRESS], int(os.environ[MASTER_PORT])

    def absent() -> str | None:
        """Which processes have not come."""
        ranks = [str(rank) for rank in range(launch.size) if not store.check([f"here/{rank}"])]
        shown = f"{', '.join(ranks[:8])}{', ...' if len(ranks) > 8 else ''}"
        return f"rank{'s' if len(ranks) > 1 else ''} {shown} did not come" if ranks else None

    try:
        store = _open_store(launch, seconds, watchdog, host, port)
        store.set(f"here/{launch.rank}", "")
        _wait(who, watchdog, absent, seconds)
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        if "EADDRINUSE" in reason:
            raise InputError(f"{who}: {MASTER_PORT} = {port} is in use; set another one in all processes") from error
        raise FailedError(
            f"{who}: another process was lost while they met at {host}, port {port} ({reason}); the same command tries again"
        ) from error
    return store


def _open_store(launch: Launch, seconds: float, watchdog: Watchdog, host: str, port: int) -> Any:
    """Open the store of rank 0, or of torchrun, which has its own."""

    def silence() -> str | None:
        """Why rank 0 does not answer; None if something does."""
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            return f"rank 0 does not answer at {host}, port {port} ({error.strerror or error})"
        return None

    listens = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not listens:
        _wait(f"rank {launch.rank} of {launch.size}", watchdog, silence, seconds)
    else:
        # Rank 0 need not resolve its own name. Where it does, its address is better: torch asks for the name of the address
        # that it connects to, and in a network without a name server nobody answers for that of the loopback.
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            host = "127.0.0.1"
    limit = timedelta(seconds=seconds)
    store = torch_distributed.TCPStore(host, port, launch.size, listens, timeout=limit, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch_distributed.PrefixStore(f"gaudi-bert/{attempt}", store)
