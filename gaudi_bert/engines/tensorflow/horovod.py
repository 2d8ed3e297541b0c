"""Several processes by Horovod: the upstream one on CPUs (Gloo or MPI), or habana-horovod on Gaudi, which has the same name.

The first call is `hvd.init()`: on Gaudi, the device may be loaded only after it, and TensorFlow used only then. Tensors
are reduced one by one under fixed names; Horovod merges what is ready at the same time into buffers of
`training.fusion_bytes`. Small host arrays travel as float64 through the CPU, whatever the device is.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gaudi_bert.common.arrays import FloatArray, WeightArrays
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.launch import find_launch
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.engines.watchdog import SLOW_WORK_FACTOR, ConnectedProcess, shared_facts


@dataclass(frozen=True)
class HorovodCommunicator(ConnectedProcess):
    """One of several processes."""

    horovod: Any = None
    errors: ClassVar[tuple[type[Exception], ...]] = (tf.errors.OpError, RuntimeError)

    def sum_tensors(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over all processes, inside a graph."""
        hvd = self.horovod
        return [hvd.allreduce(tensor, op=hvd.Sum, name=f"gradient_{index}") for index, tensor in enumerate(tensors)]

    def sum_array(self, values: NDArray[Any]) -> FloatArray:
        """The sum over all processes of a small host array (float64)."""
        self.arrive()
        with tf.device("/CPU:0"):
            array = tf.constant(np.asarray(values, np.float64))
            return self.horovod.allreduce(array, op=self.horovod.Sum, name="host_array").numpy()

    def broadcast(self, arrays: WeightArrays) -> WeightArrays:
        """The arrays of rank 0, in every process; names and shapes are the same in all."""
        self.arrive()
        with tf.device("/CPU:0"):
            return {
                name: self.horovod.broadcast(tf.constant(array), 0, name=f"state_{index}").numpy()
                for index, (name, array) in enumerate(arrays.items())
            }


def connect(settings: LoopSettings, facts: Mapping[str, Any]) -> Communicator:
    """The communicator of all processes of this launch; without a launcher, of this one alone."""
    launch = find_launch()
    if launch is None or launch.size == 1:
        return Communicator()
    who = f"rank {launch.rank} of {launch.size}, started by {launch.launcher}"
    defaults = {
        "HOROVOD_FUSION_THRESHOLD": settings.fusion_bytes,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": math.ceil(settings.stall_seconds),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": math.ceil(SLOW_WORK_FACTOR * settings.stall_seconds),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, str(value))
    try:
        hvd = importlib.import_module("horovod.tensorflow")
    except ImportError as error:
        raise InputError(
            f"{who}: several processes need Horovod, and it is not installed ({error}); on CPUs run `make setup-horovod`, "
            "on Gaudi use the training image with habana-horovod, or start one process without a launcher"
        ) from error
    try:
        hvd.init()
        rank, size, local_size = hvd.rank(), hvd.size(), hvd.local_size()
    except (RuntimeError, ValueError, OSError) as error:
        raise FailedError(
            f"{who}: Horovod cannot connect ({' '.join(str(error).split())}); start all ranks again"
        ) from error
    if (rank, size) != (launch.rank, launch.size):
        raise InputError(
            f"{who}: Horovod reports rank {rank} of {size}; it was probably built without MPI: "
            "start the processes by `horovodrun --gloo`, or build Horovod with MPI"
        )
    # Compared later: sums need the device, which is opened after this.
    facts = {"tensorflow": tf.__version__, **shared_facts(settings, facts)}
    return HorovodCommunicator(rank, size, local_size, facts=facts, horovod=hvd)
