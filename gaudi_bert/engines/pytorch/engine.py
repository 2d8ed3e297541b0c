"""PyTorch as `engines/protocol.Engine`, and the device that it computes on: a CPU, a GPU, or a Gaudi card.

On Gaudi, with the vendor's software of today, the order of calls is fixed by its documentation:
`habana_frameworks.torch.core` registers the device; for several processes `habana_frameworks.torch.distributed.hccl`
registers the backend, and only then are they connected (`distributed.py`); what it reads from the environment is set before
torch is imported (`__init__.py`). Each process takes the card of its local rank.
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
from gaudi_bert.engines.pytorch import distributed, environment_notes, has_gaudi
from gaudi_bert.engines.pytorch.model import TorchBert, TorchModel, build_encoder
from gaudi_bert.engines.pytorch.updates import TorchUpdates
from gaudi_bert.model.config import BertConfig

NAME: EngineName = "pytorch"

# What torch.compile compiles with.
_COMPILERS: dict[DeviceKind, str] = {"cpu": "inductor", "cuda": "inductor", "hpu": "hpu_backend"}

updates = TorchUpdates


def connect(settings: LoopSettings, facts: Mapping[str, Any]) -> Communicator:
    """The communicator of all processes of this launch, with the same `facts`; without a launcher, of this one alone."""
    return distributed.connect(_kind_of(settings), settings, facts)


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
    compiler = _COMPILERS[kind] if compiled else None
    if compiled:  # a graph for each shape: `serve` has up to 12, and by default there may be 8
        torch._dynamo.config.cache_size_limit = 64  # noqa: SLF001
    if not isinstance(spec.config, BertConfig):
        return build_encoder(spec, device, seed=seed, compute_dtype=compute_dtype, compiler=compiler)
    return TorchBert(spec, device, seed=seed, compute_dtype=compute_dtype, compiler=compiler)


# --- the device

_MAY_DIFFER = "note: a resumed run may differ in rounding"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_GAUDI = "use the image of docker/train-gaudi-pytorch.Dockerfile, or install the vendor's PyTorch of the driver's release"


def _kind_of(settings: LoopSettings) -> DeviceKind:
    """The kind of device of a run; "auto" takes a Gaudi card, else a GPU, else the CPU. Registers Gaudi where it is used."""
    section, kind = settings.section_name, settings.device
    if kind in ("auto", "hpu"):
        missing = _load_gaudi()
        if missing is None:
            return "hpu"
        if kind == "hpu":
            raise InputError(f"{section}.device = hpu: {missing}; or set {section}.device = cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"{section}.device = cuda: PyTorch sees no GPU here; check nvidia-smi and that PyTorch was built for CUDA, "
            f"or set {section}.device = cpu"
        )
    return "cuda" if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()) else "cpu"


def open_device(settings: LoopSettings, threads: int | None = None) -> Device:
    """Open the device of `settings`, after the processes are connected; `threads` are those of a CPU's operations."""
    kind = _kind_of(settings)
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
        # Every update allocates the same large tensors again. By default glibc returns them to the kernel in between, which
        # clears each page when it is touched next: a fifth of the time of an update.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, -1)
        return device("cpu", description=f"CPU, {torch.get_num_threads()} threads")
    if kind == "cuda":
        # An operation without a deterministic kernel is then refused (`updates.py`); attention takes one.
        torch.use_deterministic_algorithms(settings.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # what is not written is not read here
        notes: tuple[str, ...] = (f"{_MAY_DIFFER}: {settings.section_name}.deterministic = false",)
        if settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
            notes = ()
        card, cards = distributed.local_rank(), torch.cuda.device_count()
        if card >= cards:
            raise InputError(f"this machine has {cards} GPUs, and process {card + 1} has none: start at most {cards} on it")
        torch.cuda.set_device(card)
        return device(f"cuda:{card}", description=f"GPU {card}, {torch.cuda.get_device_name(card)}", notes=notes)
    notes = (*environment_notes(), f"{_MAY_DIFFER}: the vendor of Gaudi does not promise the same bits twice")
    return device("hpu", description="Gaudi card, PyTorch", notes=notes)


def _load_gaudi() -> str | None:
    """Register the device `hpu`; return what is missing, the software, the driver or the card, with the remedy."""
    if not has_gaudi():
        return f"the package habana_frameworks is not installed; {_GAUDI}"
    try:
        importlib.import_module("habana_frameworks.torch.core")
    except (ImportError, OSError, RuntimeError) as error:
        return f"habana_frameworks.torch.core cannot be loaded ({' '.join(str(error).split())}); {_GAUDI}"
    module = getattr(torch, "hpu", None)
    if module is None or not module.is_available():
        return "no Gaudi card is visible; check hl-smi and HABANA_VISIBLE_DEVICES, and that no other process holds the card"
    return None
