"""PyTorch as `engines/protocol.Engine`."""

from __future__ import annotations

import shutil

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import GaudiSettings, LoopSettings, TrainingSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.engines.communicator import Communicator
from gaudi_bert.engines.protocol import ComputeDtype, Device, ModelSpec
from gaudi_bert.engines.pytorch import device as devices
from gaudi_bert.engines.pytorch import distributed
from gaudi_bert.engines.pytorch.graph import report_on_step as report_on_step
from gaudi_bert.engines.pytorch.model import TorchBert, TorchModel
from gaudi_bert.engines.pytorch.updates import TorchUpdates
from gaudi_bert.model.config import BertConfig

NAME: EngineName = "pytorch"


def connect(settings: LoopSettings) -> Communicator:
    """The communicator of all processes of this launch; without a launcher, that of this process alone."""
    return distributed.connect(settings, devices.kind_of(settings))


def open_device(settings: LoopSettings, gaudi: GaudiSettings | None = None, threads: int | None = None) -> Device:
    """Open the device of `settings`; after `connect`, and before any model is built."""
    return devices.open_device(settings, threads)


def build(
    spec: ModelSpec,
    device: Device | None = None,
    *,
    seed: int | None,
    compute_dtype: ComputeDtype | None = None,
    compiled: bool = False,
) -> TorchModel:
    """A model on a device; on the CPU in float32 where none is given."""
    kind = device.kind if device is not None else "cpu"
    if compiled and kind == "cpu" and shutil.which("g++") is None:
        raise InputError("training.compile = true: torch.compile needs g++ on a CPU; install it, or set it to false")
    compiler = devices.COMPILERS[kind] if compiled else None
    if not isinstance(spec.config, BertConfig):
        from gaudi_bert.engines.pytorch.encoder_model import build_encoder  # loads transformers

        return build_encoder(spec, device, seed=seed, compute_dtype=compute_dtype, compiler=compiler)
    return TorchBert(spec, device, seed=seed, compute_dtype=compute_dtype, compiler=compiler)


def updates(
    model: TorchModel, settings: TrainingSettings, communicator: Communicator, accumulation_steps: int
) -> TorchUpdates:
    """Updates of a model by the optimizer of `settings`, whose moments start at zero."""
    return TorchUpdates(model, settings, communicator, accumulation_steps)
