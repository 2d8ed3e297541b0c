"""Take up a run where its newest whole checkpoint left it.

The first process reads the checkpoint, the others are given what it read, so the folder need not be shared. A run may go
on with another number of processes: the position in the data is then the same number of packs in total, and the order from
there on is another one, which is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.training.checkpoint import read_newest
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.loop import Progress
from gaudi_bert.training.optimizers import Optimizer

__all__ = ["resume_run", "share_state"]


def resume_run(
    checkpoints: Path,
    model: BertForPretraining,
    optimizer: Optimizer,
    processes: int,
    say: Callable[[str], None],
) -> Progress:
    """Restore model, optimiser and position from the newest whole checkpoint; from the start where there is none.

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
    packs, before = progress["packs_per_process"], progress["processes"]
    if before != processes:
        packs = packs * before // processes
        say(
            f"note: {before} processes wrote the checkpoint, {processes} go on: "
            "the data goes on after as many packs, in another order"
        )
    say(f"train: goes on after update {checkpoint.update}")
    return Progress(checkpoint.update, packs, progress["sequences"], progress["tokens"])


def share_state(progress: Progress, model: BertForPretraining, optimizer: Optimizer, communicator: Communicator) -> Progress:
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
