"""The PyTorch implementation of `engines/protocol.Engine`, and opening its device: a CPU, a GPU or a Gaudi card.

The documentation of the current Gaudi software prescribes the order of calls. First, the environment variables are set,
before torch is imported (`__init__.py`). Then `habana_frameworks.torch.core` registers the device. For several processes,
`habana_frameworks.torch.distributed.hccl` registers the backend, and only then are the processes connected
(`distributed.py`). Each process uses the card whose number is its local rank.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.engines.protocol import Communicator, ComputeDtype, Device, DeviceKind, ModelSpec
from gaudi_bert.engines.pytorch import describe_nondefault_environment_variables, distributed, is_habana_frameworks_installed
from gaudi_bert.engines.pytorch.bert_model import TorchBert
from gaudi_bert.engines.pytorch.model import TorchModel
from gaudi_bert.engines.pytorch.updates import TorchUpdates
from gaudi_bert.model.config import BertConfig

NAME: EngineName = "pytorch"

# The backend of torch.compile for each kind of device.
_COMPILERS: dict[DeviceKind, str] = {"cpu": "inductor", "cuda": "inductor", "hpu": "hpu_backend"}

create_updates = TorchUpdates


def connect_processes(settings: LoopSettings, facts: Mapping[str, Any]) -> Communicator:
    """Use torch.distributed to connect the processes that a launcher started. See `Engine.connect_processes`."""
    return distributed.connect_processes(_select_device_kind(settings), settings, facts)


def build_model(
    spec: ModelSpec,
    device: Device | None = None,
    *,
    seed: int | None,
    compute_dtype: ComputeDtype | None = None,
    compiled: bool = False,
) -> TorchModel:
    """Build a model on a device, or on the CPU in float32 if no device is given. See `Engine.build_model`.

    Raises:
        InputError: The model cannot be built or cannot process packs, or compilation needs g++, which is missing.
    """
    kind = device.kind if device is not None else "cpu"
    if compiled and kind == "cpu" and shutil.which("g++") is None:
        raise InputError(
            "training.compile = true: torch.compile needs g++ on a CPU; install g++, or set training.compile to false"
        )
    compiler = _COMPILERS[kind] if compiled else None
    if compiled:  # `serve` compiles up to 12 shapes, but the default limit is 8 graphs
        torch._dynamo.config.cache_size_limit = 64  # noqa: SLF001
    if not isinstance(spec.config, BertConfig):
        from gaudi_bert.engines.pytorch.encoder_model import build_encoder  # imported here, because it imports transformers

        return build_encoder(spec, device, seed=seed, compute_dtype=compute_dtype, compiler=compiler)
    return TorchBert(spec, device, seed=seed, compute_dtype=compute_dtype, compiler=compiler)


# --- The device

_MAY_DIFFER = "note: a resumed run may differ in rounding"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # constants from malloc.h of glibc
_GAUDI = "use the image of docker/train-gaudi-pytorch.Dockerfile, or install the vendor's PyTorch for the driver's release"


def _select_device_kind(settings: LoopSettings) -> DeviceKind:
    """Return the kind of device that a run uses. If it is a Gaudi card, register the card with PyTorch.

    For "auto", prefer a Gaudi card, then a GPU, then the CPU.

    Raises:
        InputError: The requested device is not available.
    """
    section, kind = settings.section_name, settings.device
    if kind in ("auto", "hpu"):
        missing = _register_gaudi_or_explain_failure()
        if missing is None:
            return "hpu"
        if kind == "hpu":
            raise InputError(f"{section}.device = hpu: {missing}; or set {section}.device = cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"{section}.device = cuda: PyTorch finds no GPU; check nvidia-smi and that PyTorch was built for CUDA, "
            f"or set {section}.device = cpu"
        )
    return "cuda" if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()) else "cpu"


def open_device(settings: LoopSettings, threads: int | None = None) -> Device:
    """Open the device that the settings specify. Call this after `connect_processes`.

    Args:
        settings: The settings of the training loop.
        threads: The number of CPU threads of an operation. None for the default.

    Raises:
        InputError: The device is not available, or this machine has fewer GPUs than processes.
    """
    kind = _select_device_kind(settings)
    device = partial(
        Device,
        kind,
        compute_dtype=settings.precision,
        compiles=settings.compile if settings.compile is not None else kind == "hpu",
        recomputes=settings.recompute,
        fuses_attention=settings.gaudi_fused_attention,
    )
    if kind == "cpu":
        if threads is not None:
            torch.set_num_threads(threads)
        # Every update allocates large tensors of the same sizes again. By default, glibc returns freed memory to the
        # operating system, which must clear each page before it can be used again. This takes a fifth of the time of an
        # update, so make glibc keep the memory.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, -1)
        return device("cpu", description=f"CPU, {torch.get_num_threads()} threads")
    if kind == "cuda":
        # In deterministic mode, PyTorch raises an error for every operation that has no deterministic kernel. `updates.py`
        # converts the error into a message for the user. Attention works, because it has a deterministic kernel.
        torch.use_deterministic_algorithms(settings.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # uninitialized memory is never read here
        notes: tuple[str, ...] = (f"{_MAY_DIFFER}: {settings.section_name}.deterministic = false",)
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
            notes = ()
        card, cards = distributed.find_local_rank(), torch.cuda.device_count()
        if card >= cards:
            raise InputError(
                f"this machine has {cards} GPUs, but more processes were started; start at most {cards} processes"
            )
        torch.cuda.set_device(card)
        return device(f"cuda:{card}", description=f"GPU {card}, {torch.cuda.get_device_name(card)}", notes=notes)
    notes = (
        *describe_nondefault_environment_variables(),
        f"{_MAY_DIFFER}: the Gaudi software does not guarantee the same bits in every run",
    )
    return device("hpu", description="Gaudi card, PyTorch", notes=notes)


def _register_gaudi_or_explain_failure() -> str | None:
    """Register the device `hpu` of the Gaudi software. If no Gaudi card can be used, return why.

    Returns:
        None if a card is available. Otherwise, a description of what is missing (the software, the driver or the card), and
        what to do.
    """
    if not is_habana_frameworks_installed():
        return f"the package habana_frameworks is not installed; {_GAUDI}"
    try:
        importlib.import_module("habana_frameworks.torch.core")
    except (ImportError, OSError, RuntimeError) as error:
        return f"habana_frameworks.torch.core cannot be loaded ({' '.join(str(error).split())}); {_GAUDI}"
    module = getattr(torch, "hpu", None)
    if module is None or not module.is_available():
        return "no Gaudi card is visible; check hl-smi and HABANA_VISIBLE_DEVICES, and that no other process uses the card"
    return None
