"""What every process of a run of the model settles for itself: its threads, its kernels, where foreign lines go."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gaudi_bert.common.native_lines import native_lines_to
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:
    from gaudi_bert.training.device import Device
    from gaudi_bert.training.distributed.communicator import Communicator

__all__ = ["COMPILED_KEY", "compiles_kernels", "native_lines_in", "threads_of"]

COMPILED_KEY = "compiled_kernels"


def threads_of(asked: int | None, processes_on_host: int) -> int | None:
    """CPU threads of this process: processes that share a host share its cores."""
    return asked if asked is not None or processes_on_host == 1 else max(1, (os.cpu_count() or 1) // processes_on_host)


def native_lines_in(out: Path, rank: int) -> AbstractContextManager[None]:
    """TensorFlow's and XLA's own lines go to a log file of each process, where it sees the folder of the run."""
    if not out.is_dir():
        return nullcontext()
    return native_lines_to(out / ("tensorflow.log" if rank == 0 else f"tensorflow-{rank}.log"))


def compiles_kernels(checkpoints: Path, communicator: Communicator, device: Device, reporter: Reporter) -> bool:
    """Whether kernels are compiled: as when the run began, because compiled dropout draws other places."""
    from gaudi_bert.training.checkpoint import newest_settings

    stored = newest_settings(checkpoints) if communicator.is_first else None
    choice = np.array([0.0, 0.0] if stored is None else [1.0, float(stored.get(COMPILED_KEY, False))])
    is_resumed, was_compiled = (value > 0 for value in communicator.sum_array(choice))
    if not is_resumed:
        return device.compiles_kernels
    if was_compiled and device.kind == "hpu":
        reporter.say("note: the run began with kernels compiled for a CPU; from here on dropout draws other places")
        return False
    return bool(was_compiled)
