"""Joins the processes that a launcher started together."""

from __future__ import annotations

from gaudi_bert.common.launch import find_launch
from gaudi_bert.config import TrainingSettings
from gaudi_bert.training.distributed.communicator import Communicator

__all__ = ["connect"]


def connect(settings: TrainingSettings) -> Communicator:
    """The communicator of all processes of this launch; without a launcher, that of this process alone.

    Raises:
        InputError: started by a launcher, but Horovod is missing or cannot connect.
    """
    launch = find_launch()
    if launch is None or launch.size == 1:
        return Communicator()
    # Imported late: one process alone loads nothing of it.
    from gaudi_bert.training.distributed.horovod import connect_by_horovod

    return connect_by_horovod(launch, settings)
