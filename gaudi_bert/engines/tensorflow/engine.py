"""TensorFlow as `engines/protocol.Engine`."""

from __future__ import annotations

from gaudi_bert.config.sections import LoopSettings, TrainingSettings
from gaudi_bert.engines.communicator import Communicator
from gaudi_bert.engines.protocol import ComputeDtype, Device, EngineName, ModelSpec
from gaudi_bert.engines.tensorflow import device as devices
from gaudi_bert.engines.tensorflow import horovod
from gaudi_bert.engines.tensorflow.graph import report_on_step as report_on_step
from gaudi_bert.engines.tensorflow.model import TensorFlowModel
from gaudi_bert.engines.tensorflow.updates import TensorFlowUpdates

NAME: EngineName = "tensorflow"

open_device = devices.open_device


def connect(settings: LoopSettings) -> Communicator:
    """The communicator of all processes of this launch, by Horovod; without a launcher, that of this process alone."""
    return horovod.connect(settings)


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


def updates(
    model: TensorFlowModel, settings: TrainingSettings, communicator: Communicator, accumulation_steps: int
) -> TensorFlowUpdates:
    """Updates of a model by the optimizer of `settings`, whose moments start at zero."""
    return TensorFlowUpdates(model, settings, communicator, accumulation_steps)
