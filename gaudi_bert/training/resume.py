"""Take up a run where its newest whole checkpoint left it.

The first process reads the checkpoint, the others are given what it read, so the folder need not be shared. The position
in the data is a number of packs, and any number of processes goes on there in the same order. Checkpoints of versions that
read in another order go on with the next epoch, so that no pack is read twice in one; that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.bert import PackedBert
from gaudi_bert.training.checkpoint import read_newest
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.loop import Progress
from gaudi_bert.training.optimizers import Optimizer

__all__ = ["resume_run", "share_state"]


def resume_run(
    checkpoints: Path,
    model: PackedBert,
    optimizer: Optimizer,
    epoch_packs: Callable[[], int],
    say: Callable[[str], None],
) -> Progress:
    """Restore model, optimiser and position from the newest whole checkpoint; from the start where there is none.

    Args:
        checkpoints: their folder.
        model, optimizer: what is restored.
        epoch_packs: finds the packs of an epoch, for a checkpoint of another order.
        say: where notes go.

    Raises:
        InputError: all checkpoints are damaged, or are of another model.
    """
    checkpoint = read_newest(checkpoints, say)
    if checkpoint is None:
        return Progress()
    _assign(model.variables_by_name, checkpoint.variables, checkpoints)
    _assign(optimizer.first_moments, checkpoint.first_moments, checkpoints)
    _assign(optimizer.second_moments, checkpoint.second_moments, checkpoints)
    progress = checkpoint.progress
    packs = progress["packs"] if "packs" in progress else _next_epoch(progress, epoch_packs(), say)
    say(f"train: goes on after update {checkpoint.update}")
    return Progress(checkpoint.update, packs, progress["sequences"], progress["tokens"])


def _next_epoch(progress: Mapping[str, int], epoch_packs: int, say: Callable[[str], None]) -> int:
    """Where the epoch begins that follows the one in which an earlier version stood."""
    done = progress["packs_per_process"] * progress["processes"]
    epochs = -(-done // epoch_packs)
    say(
        "note: an earlier version wrote the checkpoint, which read in another order: the rest of its epoch "
        f"({epochs * epoch_packs - done:,} packs) is left out, and the data goes on with epoch {epochs}"
    )
    return epochs * epoch_packs


def share_state(progress: Progress, model: PackedBert, optimizer: Optimizer, communicator: Communicator) -> Progress:
    """Give every process the first one's model, optimiser and progress; the others' are replaced."""
    first = communicator.is_first
    shared = communicator.sum_array(np.array(astuple(progress) if first else astuple(Progress()), np.float64))
    states = (model.variables_by_name, optimizer.first_moments, optimizer.second_moments)
    communicator.broadcast([variable for state in states for variable in state.values()])
    return Progress(*(int(value) for value in shared))


def _assign(variables: Mapping[str, tf.Variable], values: WeightArrays, path: Path) -> None:
    for name in [*variables, *(name for name in values if name not in variables)]:
        found = list(values[name].shape) if name in values else "absent"
        wanted = list(variables[name].shape) if name in variables else "absent"
        if found != wanted:
            raise InputError(
                f"{path}: the checkpoint is of another model: {name} is {found} there, {wanted} here; "
                "use the model settings that it was trained with"
            )
    for name, variable in variables.items():
        variable.assign(values[name])
