"""Which of several processes this is, as the launcher that started it says in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gaudi_bert.common.errors import InputError

__all__ = ["Launch", "find_launch"]

# Launcher, and where it puts a process's number and how many there are. Open MPI's is what the Gaudi images have.
LAUNCHERS = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
)


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        launcher: the program that started it.
        rank: its number, from 0.
        size: how many were started together.
    """

    launcher: str
    rank: int
    size: int


def find_launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """What a launcher left in `environment` (default: this process's); None without one.

    Raises:
        InputError: the variables are there, but are no rank and size.
    """
    found = os.environ if environment is None else environment
    for launcher, rank_name, size_name in LAUNCHERS:
        if rank_name not in found or size_name not in found:
            continue
        rank, size = found[rank_name], found[size_name]
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise InputError(
                f"{rank_name}={rank} and {size_name}={size} are not 0 <= rank < size; unset both, or use {launcher}"
            )
        return Launch(launcher, int(rank), int(size))
    return None
