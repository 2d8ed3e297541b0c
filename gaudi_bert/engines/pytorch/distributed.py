"""Several processes by torch.distributed: Gloo between CPUs, NCCL between GPUs, HCCL between Gaudi cards.

Started by torchrun, by mpirun, or by our own launchers. Gradients travel in merged buffers of at most
`training.fusion_bytes`, in a fixed order; small host arrays travel as float64 through a group of CPUs, whatever the device.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as torch_distributed
from torch.nn import Parameter

from gaudi_bert.common.arrays import FloatArray, WeightArrays
from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError
from gaudi_bert.common.launch import MASTER_ADDRESS, MASTER_PORT, Launch, find_launch, find_node
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.protocol import Communicator, DeviceKind
from gaudi_bert.engines.watchdog import ConnectedProcess, difference_of, shared_facts

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "hpu": "hccl"}
# How long a sum waits for a process: the watchdog ends a run earlier, and names the process.
_TIMEOUT = timedelta(hours=1)
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

    Gradients travel in parts of at most `part_bytes`, each merged into one buffer, in the order of the parameters. A pass
    reaches the last parameters first, so the last part is sent first, in every process, however soon another one is
    complete: what is added up, and in which order, does not depend on time. Gloo gives the same bits as without overlap;
    NCCL and HCCL do where their own sums are deterministic.
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
        os.environ.update(node.variables(0))
    launch = find_launch()
    if launch is None or launch.size == 1:
        return Communicator()
    who = f"rank {launch.rank} of {launch.size}, started by {launch.launcher}"
    local_size = _first_number(_LOCAL_SIZES, launch.size)  # all of them, where the launcher does not say
    _set_address(launch, local_size, who)
    if device == "hpu":
        _register_hccl(launch)
    try:
        if not torch_distributed.is_initialized():
            shared = {"torch": torch.__version__, "device": device, **shared_facts(settings, facts)}
            store = meet(launch, settings.meeting_seconds, shared)
            torch_distributed.init_process_group(
                _BACKENDS[device], store=store, rank=launch.rank, world_size=launch.size, timeout=_TIMEOUT
            )
            # Its threads would otherwise be torn down with the interpreter, which now and then aborts the process.
            atexit.register(_part)
        host_group = None if device == "cpu" else torch_distributed.new_group(backend="gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise FailedError(f"{who}: torch.distributed cannot connect ({reason}); start all ranks again") from error
    return TorchCommunicator(launch.rank, launch.size, local_size, host_group=host_group)


def _part() -> None:
    if torch_distributed.is_initialized():
        with suppress(RuntimeError):  # the others may be gone
            torch_distributed.destroy_process_group()


def _register_hccl(launch: Launch) -> None:
    """Register the backend, which takes the card of this process from the variables that torchrun and mpirun set."""
    hccl = importlib.import_module("habana_frameworks.torch.distributed.hccl")
    if not any(all(name in os.environ for name in names) for names in _KNOWN_TO_HCCL):
        hccl.initialize_distributed_hpu(world_size=launch.size, rank=launch.rank, local_rank=local_rank())


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
    """Where rank 0 listens, unless the launcher names it; on one host it is this one."""
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


# --- How the processes of a launch meet before they compute: rank 0 listens, the others find it, and all run the same
#
# torch's own meeting waits where no signal is heard, an hour for a process that never comes, and names none. So processes
# look for one another here, for `meeting_seconds` at most: names may not resolve yet, and pods start at different times.
# Each says who it is and what it runs; rank 0 compares that with its own, and lets all begin or none. A process that is lost
# meanwhile is worth another try (exit code 1), one that runs something else is not (2), and one that is stopped on request
# stops the others likewise (75).

_POLL_SECONDS = 0.2
# What passes sooner is not reported.
_QUIET_SECONDS = 5.0
# How long a process that listens may take to accept.
_CONNECT_SECONDS = 10.0
# How long a process may take to answer that was there a moment ago.
_ANSWER_SECONDS = 20.0
# Long enough for all to have read the verdict of a process that ends.
_FAREWELL_SECONDS = 5 * _POLL_SECONDS
T = TypeVar("T")
_ERRORS = {error.exit_code: error for error in (FailedError, InputError, StoppedError)}


@dataclass(frozen=True)
class _MeetingPoint:
    """Where processes meet, how long they wait there, and who this one is."""

    launch: Launch
    host: str
    port: int
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.launch.rank} of {self.launch.size}"

    def wait(self, reason: Callable[[], str | None], hopeless: str) -> None:
        """Return when there is no `reason` to wait any more: it is reported once, and ends the run after `seconds`."""
        began, is_said = time.monotonic(), False
        while (because := reason()) is not None:
            waited = time.monotonic() - began
            if waited >= self.seconds:
                raise FailedError(f"{self}: {because}, after {self.seconds:g} s; {hopeless}")
            if waited >= _QUIET_SECONDS and not is_said:
                is_said = True
                Reporter().say(f"{self} waits, at most {self.seconds:g} s: {because}")
            time.sleep(_POLL_SECONDS)


def meet(launch: Launch, seconds: float, facts: Mapping[str, Any]) -> Any:
    """The store by which all processes of the launch continue, once all are there and have the same `facts`.

    Raises:
        FailedError: a process does not come within `seconds`, or is lost.
        InputError: rank 0 cannot listen, or `facts` differ.
        StoppedError: one of them is stopped on request.
    """
    point = _MeetingPoint(launch, os.environ[MASTER_ADDRESS], int(os.environ[MASTER_PORT]), seconds)
    with _lost_as_failure(point):
        store = _open_store(point)
        try:
            _introduce(store, point, facts)
            _agree(store, point)
        except KeyboardInterrupt:
            _tell(store, StoppedError(f"{point} was stopped on request before training had started; run it again"))
            raise
        except GaudiBertError as error:
            _tell(store, error)
            raise
    return store


@contextmanager
def _lost_as_failure(point: _MeetingPoint) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split("\n")[0].split())
        raise FailedError(
            f"{point}: another process was lost while they met at {point.host}, port {point.port} ({reason}); "
            "the same command tries again"
        ) from error


def _open_store(point: _MeetingPoint) -> Any:
    """The store of rank 0, or of torchrun, which has its own."""
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = point.launch.rank == 0 and not of_torchrun
    if listens:
        _check_port(point)
    else:
        hopeless = (
            f"see that rank 0 runs, and that {MASTER_ADDRESS} and {MASTER_PORT} are right; the same command tries again"
        )
        point.wait(lambda: _silence(point), hopeless)
    # Rank 0 need not resolve its own name. Where it does, its address is better: torch asks for the name of the address that
    # it connects to, and in a network without a name server nobody answers for that of the loopback.
    host = "127.0.0.1" if listens and not _resolves(point.host) else point.host
    timeout = timedelta(seconds=_CONNECT_SECONDS)
    size = point.launch.size
    store = _answered(
        lambda: torch_distributed.TCPStore(host, point.port, size, listens, timeout=timeout, wait_for_workers=False)
    )
    store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return torch_distributed.PrefixStore(f"gaudi-bert/{attempt}", store)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _answered(ask: Callable[[], T]) -> T:
    """What rank 0 answers. In a thread: torch waits without end, and hears no signal, if rank 0 is silent but not gone."""
    answers: SimpleQueue[T | Exception] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put(ask())
        except (RuntimeError, ValueError, OSError) as error:
            answers.put(error)

    Thread(target=answer, name="meeting", daemon=True).start()
    try:
        value = answers.get(timeout=_ANSWER_SECONDS)
    except Empty:
        raise TimeoutError(f"nothing was heard for {_ANSWER_SECONDS:g} s: does another program listen there?") from None
    if isinstance(value, Exception):
        raise value
    return value


def _check_port(point: _MeetingPoint) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", point.port))
        except OSError as error:
            raise InputError(
                f"{point}: cannot listen at {MASTER_PORT} = {point.port} ({error.strerror}); "
                "set another one, the same in all processes, or end what listens there"
            ) from error


def _silence(point: _MeetingPoint) -> str | None:
    """Why rank 0 does not answer; None if something does."""
    try:
        socket.create_connection((point.host, point.port), _CONNECT_SECONDS).close()
    except OSError as error:
        return f"rank 0 does not answer at {point.host}, port {point.port} ({error.strerror or error})"
    return None


def _introduce(store: Any, point: _MeetingPoint, facts: Mapping[str, Any]) -> None:
    """Say who this process is; rank 0 waits for all and decides."""
    _set(store, f"hello/{point.launch.rank}", {"host": socket.gethostname(), "facts": dict(facts)})
    if point.launch.rank == 0:
        point.wait(lambda: _absent(store, point, "hello"), "see their errors; the same command tries again")
        difference = next(filter(None, (_difference(store, rank) for rank in range(1, point.launch.size))), None)
        if difference is not None:
            raise InputError(difference)
        _set(store, "verdict", {"text": "", "exit_code": 0})


def _agree(store: Any, point: _MeetingPoint) -> None:
    """Wait for what is decided, and then until every process has heard it."""
    hopeless = "see the error of rank 0; the same command tries again"
    point.wait(lambda: None if _is_decided(store) else "not all ranks have come", hopeless)
    _answered(lambda: store.set(f"ready/{point.launch.rank}", ""))
    point = _MeetingPoint(point.launch, point.host, point.port, _ANSWER_SECONDS)
    point.wait(lambda: _absent(store, point, "ready"), "it was lost; the same command tries again")


def _absent(store: Any, point: _MeetingPoint, what: str) -> str | None:
    """Which processes have not come."""
    _is_decided(store)
    absent = _answered(lambda: [str(each) for each in range(point.launch.size) if not store.check([f"{what}/{each}"])])
    shown = f"{', '.join(absent[:8])}{', ...' if len(absent) > 8 else ''}"
    return f"rank{'s' if len(absent) > 1 else ''} {shown} did not come" if absent else None


def _difference(store: Any, rank: int) -> str | None:
    """What a process runs that rank 0 does not."""
    first, other = (json.loads(store.get(f"hello/{each}")) for each in (0, rank))
    return difference_of(other["facts"], first["facts"], f"rank {rank} ({other['host']})", f"rank 0 ({first['host']})")


def _tell(store: Any, error: GaudiBertError) -> None:
    """Tell all processes why the run ends, and give them time to read it before this one does."""
    with suppress(RuntimeError, OSError):  # nobody listens any more
        _set(store, "verdict", {"text": str(error), "exit_code": error.exit_code})
        time.sleep(_FAREWELL_SECONDS)


def _is_decided(store: Any) -> bool:
    """Whether all may begin; the error of a process that ends the run."""
    if not _answered(lambda: store.check(["verdict"])):
        return False
    verdict = json.loads(_answered(lambda: store.get("verdict")))
    if verdict["exit_code"]:
        raise _ERRORS[verdict["exit_code"]](verdict["text"])
    return True


def _set(store: Any, key: str, value: Mapping[str, Any]) -> None:
    _answered(lambda: store.set(key, json.dumps(value)))
