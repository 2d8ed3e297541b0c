"""TensorFlow as `engines/protocol.Engine`: the device that a graph is built for, and several processes by Horovod.

On Gaudi the order of calls is fixed by its documentation: first the processes are connected (`connect`), then
`habana_frameworks.tensorflow.load_habana_module()` registers the device, and only then may a graph or a variable be created.
Each process sees one card, always as `/device:HPU:0`, which the runtime prefers for all that it can run. bfloat16 is
switched by the runtime on Gaudi, never together with a compute type of our own, and by the model's on a CPU.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gaudi_bert.common.arrays import FloatArray, WeightArrays
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.launch import find_launch
from gaudi_bert.common.threads import usable_cores
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.config.values import EngineName, Precision
from gaudi_bert.engines.protocol import Communicator, ComputeDtype, Device, ModelSpec
from gaudi_bert.engines.tensorflow import INTRA_OP_THREADS
from gaudi_bert.engines.tensorflow.model import TensorFlowModel
from gaudi_bert.engines.tensorflow.updates import TensorFlowUpdates
from gaudi_bert.engines.watchdog import SLOW_WORK_FACTOR, ConnectedProcess, shared_facts

NAME: EngineName = "tensorflow"

updates = TensorFlowUpdates


def build(
    spec: ModelSpec,
    device: Device | None = None,
    *,
    seed: int | None,
    compute_dtype: ComputeDtype | None = None,
    compiled: bool = False,
) -> TensorFlowModel:
    """A model on a device; on the CPU where none is given."""
    name = device.name if device is not None else "/device:CPU:0"
    dtype = compute_dtype or (device.compute_dtype if device is not None else "float32")
    return TensorFlowModel(spec, name, seed=seed, compute_dtype=dtype, compiled=compiled)


def open_device(settings: LoopSettings, threads: int | None = None) -> Device:
    """Open the device of `settings`; call it after `connect` and before any variable is created.

    "auto" takes a Gaudi card if its software and a card are there, else the CPU; `threads` are those of one operation.
    """
    section, kind = settings.section_name, settings.device
    if settings.recompute:
        raise InputError(f"{section}.recompute = true: PyTorch only; set {section}.engine = pytorch, or set it to false")
    if kind == "cuda":
        raise InputError(f"{section}.device = cuda: TensorFlow runs on a CPU or on Gaudi here; set {section}.engine=pytorch")
    if kind != "cpu":
        missing, notes = _load_gaudi(settings.precision)
        if missing is None:
            # Gaudi's own compiler fuses chains of elementwise operations, and its software converts to bfloat16.
            return Device("hpu", "/device:HPU:0", "float32", "Gaudi card HPU:0", compiles=False, notes=notes)
        if kind == "hpu":
            raise InputError(f"{section}.device = hpu: {missing}; or set {section}.device = cpu")
    if threads is not None and tf.config.threading.get_intra_op_parallelism_threads() != threads:
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        except RuntimeError as error:
            raise InputError(
                f"{section}.threads = {threads}: TensorFlow is already running with other threads in this process; "
                "start a new process"
            ) from error
    given = os.environ.get(INTRA_OP_THREADS, "")
    by_default = int(given) if given.isdigit() and int(given) else usable_cores()
    used = tf.config.threading.get_intra_op_parallelism_threads() or by_default
    return Device("cpu", "/device:CPU:0", settings.precision, f"CPU, {used} threads", compiles=settings.compile is not False)


# --- The Gaudi runtime: its variables, and loading its module
#
# The module reads its variables while it is loaded, so they are set between its import and `load_habana_module()`. What is
# already set belongs to the user (or the image, or the launcher) and stays.
#
# The runtime does bfloat16: it rewrites the float32 graph by the lists in `bfloat16.json`. Operations of the
# allowlist are converted; those of the strict conditional list, which only move numbers, where all their inputs are; the
# conditional list is empty, and whatever is not listed stays float32: sums, softmax, layer norm, losses and the
# optimizer. The small product of the next-sentence head is excluded by its name.

BFLOAT16_LIST = Path(__file__).with_name("bfloat16.json")
# Device memory that is reserved for communication between cards.
_HCCL_MEMORY_MB = 1536


def _load_gaudi(precision: Precision) -> tuple[str | None, tuple[str, ...]]:
    """Set the runtime's variables and register the device.

    Returns:
        What is missing, the software, the driver or the card, with the remedy; and a note for each variable that the
        environment has with another value.
    """
    try:
        habana = importlib.import_module("habana_frameworks.tensorflow")
    except ImportError:
        return (
            "the package habana_frameworks is not installed; use the Gaudi training image, "
            "or install habana-tensorflow 1.14.0.493 with TensorFlow 2.15 on Python 3.10"
        ), ()
    variables = {"TF_HCCL_MEMORY_ALLOWANCE_MB": str(_HCCL_MEMORY_MB)}
    if precision == "bfloat16":
        variables["TF_BF16_CONVERSION"] = str(BFLOAT16_LIST)
    present = {name: os.environ.setdefault(name, value) for name, value in variables.items()}
    try:
        habana.load_habana_module()
    except (RuntimeError, OSError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())
        return f"load_habana_module() failed ({reason}); check the driver with hl-smi, and that a card is visible here", ()
    if not tf.config.list_physical_devices("HPU"):
        return "no Gaudi card is visible; check hl-smi and HABANA_VISIBLE_DEVICES, and that no other process holds it", ()
    return None, tuple(
        f"note: {name}={present[name]} is set in the environment and stays (the default here is {value})"
        for name, value in variables.items()
        if present[name] != value
    )


# --- Several processes by Horovod: the upstream one on CPUs (Gloo or MPI), or habana-horovod on Gaudi, of the same name
#
# The first call is `hvd.init()`: on Gaudi, the device may be loaded only after it, and TensorFlow used only then. Tensors
# are reduced one by one under fixed names; Horovod merges what is ready at the same time into buffers of
# `training.fusion_bytes`. Small host arrays travel as float64 through the CPU, whatever the device is.


@dataclass(frozen=True)
class _HorovodProcess(ConnectedProcess):
    """One of several processes."""

    horovod: Any = None
    errors: ClassVar[tuple[type[Exception], ...]] = (tf.errors.OpError, RuntimeError)

    def sum_tensors(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        hvd = self.horovod
        return [hvd.allreduce(tensor, op=hvd.Sum, name=f"gradient_{index}") for index, tensor in enumerate(tensors)]

    def sum_array(self, values: NDArray[Any]) -> FloatArray:
        self.arrive()
        with tf.device("/CPU:0"):
            array = tf.constant(np.asarray(values, np.float64))
            return self.horovod.allreduce(array, op=self.horovod.Sum, name="host_array").numpy()

    def broadcast(self, arrays: WeightArrays) -> WeightArrays:
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
    return _HorovodProcess(rank, size, local_size, facts=facts, horovod=hvd)
