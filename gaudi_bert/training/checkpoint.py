"""Checkpoints: one file each, complete or absent, checked on reading; the newest few are retained.

A checkpoint is a safetensors file. Tensors are named `model/<variable>`, `first_moment/<variable>` and
`second_moment/<variable>`. The header's `__metadata__` holds one text: a CRC-32 and, after it, the JSON that it belongs to:
the update, the position in the data, the settings, and of every tensor its type, shape and CRC-32. So a checkpoint that was
cut short or has flipped bits is recognised, named, and the one before it is used.
"""

from __future__ import annotations

import fnmatch
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gaudi_bert.artefacts.mirrored_folder import names_in, remove
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.common.files import atomic_file, check_regular_file, explain_os_errors, open_file
from gaudi_bert.engines.protocol import Communicator, Model, Updates
from gaudi_bert.model.config import find_shape_mismatch
from gaudi_bert.reading.global_order import ORDER_VERSION

_FORMAT_VERSION = 2
CHECKPOINT_NAMES = "update-*.safetensors"
_METADATA_KEY = "gaudi_bert"
_CHECKSUM_DIGITS = 8
# The metadata comes first in the header of a safetensors file.
_FIRST_BYTES = 4096
# What the names of tensors begin with, and the tensors of a checkpoint that have them.
_GROUPS = {"model": "variables", "first_moment": "first_moments", "second_moment": "second_moments"}

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training run after `update` updates; tensors by the names of the variables.

    Attributes:
        first_moments, second_moments: the optimizer's m and v; empty in a checkpoint of weights only.
        progress: the position of the run: packs read by all processes, the number of the order in which they are read,
            processes that began the run, sequences and tokens seen; empty in a checkpoint of weights only.
        settings: `model` (BertConfig as JSON) and `training` as the run was given them, `data` (the sizes of a record),
            `compiled_kernels`, and `run`: the signature of the run, on which its weights depend.
    """

    update: int
    variables: Tensors
    first_moments: Tensors = field(default_factory=dict)
    second_moments: Tensors = field(default_factory=dict)
    progress: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


class _Position(BaseModel, strict=True, frozen=True, extra="forbid"):
    """`Checkpoint.progress` of a run."""

    packs: NonNegativeInt
    order: NonNegativeInt
    processes: PositiveInt
    sequences: NonNegativeInt
    tokens: NonNegativeInt


class _RunSettings(BaseModel, strict=True, frozen=True, extra="forbid"):
    """`Checkpoint.settings`: what is in its objects is checked by those that read them."""

    model: dict[str, Any] = {}
    training: dict[str, Any] = {}
    data: dict[str, Any] = {}
    task: str = ""
    run: dict[str, Any] = {}
    compiled_kernels: bool = False


class _State(BaseModel, strict=True, frozen=True, extra="forbid"):
    """The state in the header: `tensors` are the type, shape and CRC-32 of each."""

    format_version: Literal[2]
    update: NonNegativeInt
    progress: _Position | Annotated[dict[str, int], Field(max_length=0)]  # empty: weights alone
    settings: _RunSettings
    tensors: dict[str, tuple[str, tuple[NonNegativeInt, ...], NonNegativeInt]]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `update-<number>.safetensors` into `folder`, atomically."""
    tensors = {
        f"{group}/{name}": np.asarray(tensor, order="C")
        for group, members in _GROUPS.items()
        for name, tensor in getattr(checkpoint, members).items()
    }
    state = {
        "format_version": _FORMAT_VERSION,
        "update": checkpoint.update,
        "progress": dict(checkpoint.progress),
        "settings": dict(checkpoint.settings),
        "tensors": {name: _description(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(state, allow_nan=False)
    path = Path(folder) / f"update-{checkpoint.update:08d}.safetensors"
    with atomic_file(path) as handle:
        handle.write(save(tensors, metadata={_METADATA_KEY: f"{_checksum(text)} {text}"}))
    return path


def _description(tensor: NDArray[Any]) -> tuple[str, tuple[int, ...], int]:
    """A tensor as it must come back: type, shape, CRC-32 of the bytes."""
    content = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return tensor.dtype.name, tensor.shape, zlib.crc32(content.data)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):0{_CHECKSUM_DIGITS}x}"


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read and check a checkpoint."""
    path = Path(path)
    state = _read_state(path)
    try:
        with explain_os_errors(path, "read"), safe_open(check_regular_file(path), framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
        actual, written = {name: _description(tensor) for name, tensor in tensors.items()}, state.tensors
        for name in [*written, *actual]:
            if name not in actual or name not in written or actual[name] != written[name]:
                raise ValueError(f"{name} is not as it was written: its checksum does not match")
        return Checkpoint(
            update=state.update,
            progress=dict(state.progress),
            settings=state.settings.model_dump(exclude_unset=True),
            **{
                members: {name[len(group) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{group}/")}
                for group, members in _GROUPS.items()
            },
        )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, " ".join(str(error).split())) from error


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(f"{path}: not a complete checkpoint of gaudi-bert ({reason}); use the one before it")


def checkpoint_identity(path: Path) -> str:
    """Return what distinguishes a checkpoint from others: the checksum of its state, which holds those of all tensors."""
    return _state_text(path)[:_CHECKSUM_DIGITS]


def beginning_of(folder: Path) -> tuple[int, bool] | None:
    """Return how many processes began a run, and whether with compiled kernels, by the newest checkpoint of `folder`."""
    state = _newest_state(folder)
    if state is None or not isinstance(state.progress, _Position):
        return None
    return state.progress.processes, state.settings.compiled_kernels


def newest_settings(folder: Path) -> Mapping[str, Any] | None:
    """The settings in the newest checkpoint of `folder` whose header is intact; None without such a checkpoint."""
    state = _newest_state(folder)
    return None if state is None else state.settings.model_dump(exclude_unset=True)


def _newest_state(folder: Path) -> _State | None:
    for path in reversed(_checkpoint_files(folder)):
        try:
            return _read_state(path)
        except InputError:
            continue  # reading it in full will report it
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether the file is one of ours, damaged or not, by its header; other safetensors files are not."""
    with explain_os_errors(path, "read"), open_file(path) as handle:
        return f'"{_METADATA_KEY}":'.encode() in handle.read(_FIRST_BYTES)


def _state_text(path: Path) -> str:
    """The text in the header of a checkpoint of ours; no tensor is read."""
    try:
        with explain_os_errors(path, "read"), safe_open(check_regular_file(path), framework="np") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise _damaged(path, " ".join(str(error).split())) from error
    if _METADATA_KEY not in metadata:
        raise _damaged(path, "its header is another tool's")
    return str(metadata[_METADATA_KEY])


def _read_state(path: Path) -> _State:
    """The state in the header, once its checksum is right."""
    written, _, text = _state_text(path).partition(" ")
    if written != _checksum(text):
        raise _damaged(path, "the checksum of its header does not match")
    try:
        return _State.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        position = ".".join(str(part) for part in first["loc"] if not str(part).startswith("_"))
        raise _damaged(path, f"in its header, {position or 'JSON'}: {first['msg']}") from error


def _checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first; none when it does not exist."""
    return sorted(Path(folder).glob(CHECKPOINT_NAMES))


def find_checkpoint(path: Path | str) -> Path:
    """The checkpoint that `path` means: the file itself, or the newest in the folder or in its `checkpoints/`."""
    path = Path(path)
    if path.is_file():
        return path
    for folder in (path, path / "checkpoints"):
        files = _checkpoint_files(folder)
        if files:
            return files[-1]
    raise InputError(f"{path}: no checkpoint there; give an update-*.safetensors file, or the folder of a training run")


def _read_newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint in `folder` that is intact, None where there is none; `warn` is told of damaged ones."""
    files = _checkpoint_files(folder)
    for path in reversed(files):
        try:
            return read_checkpoint(path)
        except InputError as error:
            warn(f"warning: {error}")
    if files:
        raise InputError(f"{folder}: none of its {len(files)} checkpoints can be read; train again with --overwrite")
    return None


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    names = fnmatch.filter(names_in(folder), CHECKPOINT_NAMES)
    with explain_os_errors(folder, "remove"):
        remove(*(folder / name for name in names[: max(0, len(names) - keep)]))


# --- Resuming a run from its newest intact checkpoint
#
# The first process reads the checkpoint and the others are given what it read, so the folder need not be shared. The
# position in the data is a number of packs, and any number of processes continues there in the same order.


@dataclass(frozen=True)
class Progress:
    """The position of a run: what all processes together have read, padding not counted."""

    update: int = 0
    packs: int = 0
    sequences: int = 0
    tokens: int = 0


def resume_run(
    checkpoints: Path, model: Model, updates: Updates, run: Mapping[str, Any], say: Callable[[str], None]
) -> Progress:
    """Restore model, moments and position from the newest intact checkpoint; from the start where there is none.

    One that is not of the run of this signature, whatever its number of updates, is refused.
    """
    checkpoint = _read_newest(checkpoints, say)
    if checkpoint is None:
        return Progress()
    progress = checkpoint.progress
    if progress.get("order") != ORDER_VERSION:
        raise InputError(
            f"{checkpoints}: holds a position in the order {short_repr(progress.get('order'))}, this edition reads in "
            f"the order {ORDER_VERSION}; train again with --overwrite"
        )
    shapes, buffers = model.shapes(), model.buffers()
    trained = {name: shape for name, shape in shapes.items() if name not in buffers}
    moments = (checkpoint.first_moments, checkpoint.second_moments)
    for needed, values in ((shapes, checkpoint.variables), *((trained, each) for each in moments)):
        problem = find_shape_mismatch(needed, values)
        if problem is not None:
            raise InputError(
                f"{checkpoints}: the checkpoint is of another model: {problem}; use the model settings that it was "
                "trained with"
            )
    other = _difference(checkpoint.settings.get("run", {}), run)
    if other is not None:
        raise InputError(f"{checkpoints}: the checkpoint is of another run: {other}; remove it, or train with --overwrite")
    model.load_values(checkpoint.variables)
    updates.load_moments(checkpoint.first_moments, checkpoint.second_moments)
    return Progress(checkpoint.update, progress["packs"], progress["sequences"], progress["tokens"])


# A run may be extended (`run.py`).
_MAY_CHANGE = "settings.training.updates"


def _difference(there: Any, here: Any, name: str = "") -> str | None:
    """The first value that differs in the signatures of two runs, for people; None where none does."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        parts = (_difference(there.get(key), here.get(key), f"{name}.{key}".lstrip(".")) for key in {**here, **there})
        return next((part for part in parts if part is not None), None)
    if there == here or name == _MAY_CHANGE:
        return None
    return f"{name or 'its signature'} is {short_repr(there)} there, {short_repr(here)} here"


def share_state(progress: Progress, model: Model, updates: Updates, communicator: Communicator) -> Progress:
    """Give every process the first one's model, moments and progress; the others' are replaced."""
    if communicator.size == 1:
        return progress
    first = communicator.is_first
    shared = communicator.sum_array(np.array(astuple(progress) if first else astuple(Progress()), np.float64))
    model.load_values(communicator.broadcast(model.values()))
    updates.load_moments(*(communicator.broadcast(moments) for moments in updates.moments()))
    return Progress(*(int(value) for value in shared))
