"""The backend `hccl` between tensors on `hpu`, by Gloo; and the card of a process, by the variables that are set by now."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

from habana_frameworks.record import PLACES, record
from habana_frameworks.torch.tensors import numbers

_MPI = {f"OMPI_COMM_WORLD_{name}": name.replace("SIZE", "WORLD_SIZE") for name in ("RANK", "SIZE", "LOCAL_RANK")}


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    """Set what a launcher did not, by the arguments or by mpirun's variables; the card is that of the local rank."""
    given = {"WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": local_rank}
    if None not in given.values():
        record("initialize_distributed_hpu", variables=PLACES, **given)
        os.environ.update({name: str(value) for name, value in given.items()})
    elif not all(name in os.environ for name in given) and all(name in os.environ for name in _MPI):
        os.environ.update({name: os.environ[mpi] for mpi, name in _MPI.items()})
    if "LOCAL_RANK" in os.environ:
        os.environ.setdefault("HLS_MODULE_ID", os.environ["LOCAL_RANK"])
    return int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", -1)), int(os.environ.get("LOCAL_RANK", -1))


def _create(options: Any, _: Any) -> Any:
    record("process group", variables=PLACES, rank=options.group_rank, size=options.group_size)
    return distributed.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


def run_collective(operation: Any, arguments: Any) -> Any:
    """A sum over processes; nothing else is called here."""
    if operation is not torch.ops.c10d.allreduce_.default:
        raise NotImplementedError(str(operation))
    tensors, group = arguments[0], distributed.ProcessGroup.unbox(arguments[1])
    backend = group._get_backend(torch.device("hpu"))
    for tensor in tensors:
        record("all_reduce", type=str(tensor.dtype).removeprefix("torch."), elements=tensor.numel())
    work = backend.allreduce([numbers(tensor) for tensor in tensors])
    return tensors, work.boxed()


record("import habana_frameworks.torch.distributed.hccl", variables=PLACES)
initialize_distributed_hpu()
distributed.Backend.register_backend("hccl", _create, extended_api=True, devices=["hpu"])
