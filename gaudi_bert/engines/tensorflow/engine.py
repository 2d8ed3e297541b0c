"""The TensorFlow implementation of `engines/protocol.Engine`: opening the device, and connecting processes with Horovod.

The Gaudi documentation prescribes the order of calls. First, the processes are connected (`connect_processes`). Then
`habana_frameworks.tensorflow.load_habana_module()` registers the device. Only then may a graph or a variable be created.
Each process sees a single card as `/device:HPU:0`, and the runtime places all operations there that it can run.

On Gaudi, the runtime converts operations to bfloat16, so the model itself computes in float32. On a CPU, the model computes
in bfloat16.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gaudi_bert.common.arrays import FloatArray, WeightArrays
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.launch import detect_launcher
from gaudi_bert.common.processor import count_usable_cores
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.config.values import EngineName, Precision
from gaudi_bert.engines.protocol import Communicator, ComputeDtype, Device, ModelSpec
from gaudi_bert.engines.tensorflow import INTRA_OP_THREADS
from gaudi_bert.engines.tensorflow.model import TensorFlowModel
from gaudi_bert.engines.tensorflow.updates import TensorFlowUpdates
from gaudi_bert.engines.watchdog import SLOW_WORK_FACTOR, ConnectedProcess, collect_values_that_must_agree

NAME: EngineName = "tensorflow"

create_updates = TensorFlowUpdates


def build_model(
    spec: ModelSpec,
    device: Device | None = None,
    *,
    seed: int | None,
    compute_dtype: ComputeDtype | None = None,
    compiled: bool = False,
) -> TensorFlowModel:
    """Build a model on a device, or on the CPU if no device is given. See `Engine.build_model`."""
    name = device.name if device is not None else "/device:CPU:0"
    dtype = compute_dtype or (device.compute_dtype if device is not None else "float32")
    return TensorFlowModel(spec, name, seed=seed, compute_dtype=dtype, compiled=compiled)


def open_device(settings: LoopSettings, threads: int | None = None) -> Device:
    """Open the device that the settings specify. Call this after `connect_processes` and before any variable is created.

    For "auto", open a Gaudi card if its software and a card are available, otherwise the CPU.

    Args:
        settings: The settings of the training loop.
        threads: The number of CPU threads of an operation. None for the default.

    Raises:
        InputError: The device is not available, or does not support the settings.
    """
    section, kind = settings.section_name, settings.device
    if settings.recompute:
        raise InputError(
            f"{section}.recompute = true: only the PyTorch engine supports it; set {section}.engine = pytorch, or "
            f"{section}.recompute = false"
        )
    if kind == "cuda":
        raise InputError(
            f"{section}.device = cuda: the TensorFlow engine supports only CPUs and Gaudi; set {section}.engine = pytorch"
        )
    if kind != "cpu":
        problem, notes = _register_gaudi_card(settings.precision)
        if problem is None:
            # The Gaudi software fuses elementwise operations and converts operations to bfloat16 by itself. Therefore the
            # model is not compiled here, and its compute dtype is float32.
            return Device("hpu", "/device:HPU:0", "float32", "Gaudi card HPU:0", compiles=False, notes=notes)
        if kind == "hpu":
            raise InputError(f"{section}.device = hpu: {problem}; or set {section}.device = cpu")
    if threads is not None and tf.config.threading.get_intra_op_parallelism_threads() != threads:
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
        except RuntimeError as error:
            raise InputError(
                f"{section}.threads = {threads}: TensorFlow already runs with a different number of threads in this "
                "process; start a new process"
            ) from error
    given = os.environ.get(INTRA_OP_THREADS, "")
    by_default = int(given) if given.isdigit() and int(given) else count_usable_cores()
    used = tf.config.threading.get_intra_op_parallelism_threads() or by_default
    return Device("cpu", "/device:CPU:0", settings.precision, f"CPU, {used} threads", compiles=settings.compile is not False)


# --- The Gaudi runtime: its environment variables, and loading its module
#
# The runtime reads the variables in `load_habana_module()`, so they are set before. Variables that the user, the image or
# the launcher has already set are not changed.
#
# The runtime rewrites the float32 graph to bfloat16 according to the lists in `bfloat16.json`. Operations in the allowlist
# are always converted. Operations in the strict conditional list, which only move values, are converted if all their inputs
# are. The conditional list is empty. All other operations stay in float32: sums, softmax, layer normalization, losses and
# the optimizer. The small matrix product of the next-sentence head is excluded by its name.

BFLOAT16_LIST = Path(__file__).with_name("bfloat16.json")
# Memory on a Gaudi card, in MB, that is reserved for communication between cards.
_HCCL_MEMORY_MB = 1536


class _GaudiRegistration(NamedTuple):
    """The result of `_register_gaudi_card`.

    Attributes:
        problem: What is missing (the software, the driver or the card), and what to do. None if the card is ready.
        notes: A note for the user about each environment variable that was already set to another value.
    """

    problem: str | None
    notes: tuple[str, ...] = ()


def _register_gaudi_card(precision: Precision) -> _GaudiRegistration:
    """Set the environment variables of the Gaudi runtime, and register the Gaudi card as a TensorFlow device."""
    try:
        habana = importlib.import_module("habana_frameworks.tensorflow")
    except ImportError:
        return _GaudiRegistration(
            "the package habana_frameworks is not installed; use the Gaudi training image, "
            "or install habana-tensorflow 1.14.0.493 with TensorFlow 2.15 on Python 3.10"
        )
    variables = {"TF_HCCL_MEMORY_ALLOWANCE_MB": str(_HCCL_MEMORY_MB)}
    if precision == "bfloat16":
        variables["TF_BF16_CONVERSION"] = str(BFLOAT16_LIST)
    present = {name: os.environ.setdefault(name, value) for name, value in variables.items()}
    try:
        habana.load_habana_module()
    except (RuntimeError, OSError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())
        return _GaudiRegistration(
            f"load_habana_module() failed ({reason}); check with hl-smi that the driver works and a card is visible"
        )
    if not tf.config.list_physical_devices("HPU"):
        return _GaudiRegistration(
            "no Gaudi card is visible; check hl-smi and HABANA_VISIBLE_DEVICES, and that no process uses the card"
        )
    notes = (
        f"note: the environment sets {name}={present[name]}, which replaces the default, {value}"
        for name, value in variables.items()
        if present[name] != value
    )
    return _GaudiRegistration(None, tuple(notes))


# --- Several processes with Horovod: the original package on CPUs (Gloo or MPI), or habana-horovod on Gaudi
#
# On Gaudi, the device may only be loaded after `hvd.init()`, so `hvd.init()` is called first. Each tensor is reduced under a
# fixed name, and Horovod merges the tensors that are ready at the same time into buffers of `training.fusion_bytes`. Small
# arrays on the host are summed as float64 on the CPU, on every device.


@dataclass(frozen=True)
class _HorovodProcess(ConnectedProcess):
    """The communicator of a process in a run that connects its processes with Horovod."""

    horovod: Any = None
    errors: ClassVar[tuple[type[Exception], ...]] = (tf.errors.OpError, RuntimeError)

    def sum_tensors(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sum tensors over all processes, and return the sums. They become part of the TensorFlow graph that is being
        traced.
        """
        hvd = self.horovod
        return [hvd.allreduce(tensor, op=hvd.Sum, name=f"gradient_{index}") for index, tensor in enumerate(tensors)]

    def sum_array(self, values: NDArray[Any]) -> FloatArray:
        """Return the sum of a small array in host memory over all processes, as float64."""
        self.record_waiting_for_others()
        with tf.device("/CPU:0"):
            array = tf.constant(np.asarray(values, np.float64))
            return self.horovod.allreduce(array, op=self.horovod.Sum, name="host_array").numpy()

    def broadcast(self, arrays: WeightArrays) -> WeightArrays:
        """Return the arrays of rank 0 in every process."""
        self.record_waiting_for_others()
        with tf.device("/CPU:0"):
            return {
                name: self.horovod.broadcast(tf.constant(array), 0, name=f"state_{index}").numpy()
                for index, (name, array) in enumerate(arrays.items())
            }


def connect_processes(settings: LoopSettings, facts: Mapping[str, Any]) -> Communicator:
    """Use Horovod to connect the processes that a launcher started. See `Engine.connect_processes`."""
    launch = detect_launcher()
    if launch is None or launch.size == 1:
        return Communicator()
    process_name = f"rank {launch.rank} of {launch.size}, started by {launch.launcher}"
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
            f"{process_name}: several processes require Horovod, which is not installed ({error}); run `make "
            "setup-horovod` on CPUs, or use the training image on Gaudi"
        ) from error
    try:
        hvd.init()
        rank, size, local_size = hvd.rank(), hvd.size(), hvd.local_size()
    except (RuntimeError, ValueError, OSError) as error:
        raise FailedError(
            f"{process_name}: Horovod cannot connect the processes ({' '.join(str(error).split())}); start all ranks again"
        ) from error
    if (rank, size) != (launch.rank, launch.size):
        raise InputError(
            f"{process_name}: Horovod reports rank {rank} of {size}, probably because it was built without MPI; "
            "start the processes with `horovodrun --gloo`, or build Horovod with MPI"
        )
    # These facts must be the same in all processes. To compare them, the processes have to sum values on the device, which
    # is not open yet. Therefore `ConnectedProcess.watch_processes_during_block` compares them later.
    facts = {"tensorflow": tf.__version__, **collect_values_that_must_agree(settings, facts)}
    return _HorovodProcess(rank, size, local_size, facts=facts, horovod=hvd)
