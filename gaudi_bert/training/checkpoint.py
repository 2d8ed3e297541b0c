"""Write, read, check and remove the checkpoints of training runs, and resume a run from its newest checkpoint.

A checkpoint is one safetensors file, which is either complete or absent. Its tensors are named `model/<variable>`,
`first_moment/<variable>` and `second_moment/<variable>`. The `__metadata__` of its header contains a single string: a
CRC-32, a space, and the JSON text that the CRC-32 was computed from. The JSON contains the number of the update, the
position in the data, the settings, and the dtype, shape and CRC-32 of every tensor. A file that was truncated or has flipped
bits is therefore detected and reported, and the run is resumed from the checkpoint before it.
"""

from __future__ import annotations

import fnmatch
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gaudi_bert.artefacts.completion import describe_first_difference
from gaudi_bert.artefacts.mirrored_folder import list_names, remove_files
from gaudi_bert.common.errors import InputError, short_repr
from gaudi_bert.common.files import atomic_file, check_regular_file, explain_os_errors, open_file
from gaudi_bert.engines.protocol import Communicator, Model, Updates
from gaudi_bert.model.config import find_shape_mismatch
from gaudi_bert.reading.global_order import ORDER_VERSION

CHECKPOINT_NAMES = "update-*.safetensors"
_METADATA_KEY = "gaudi_bert"
_CHECKSUM_DIGITS = 8
# `is_checkpoint` reads only this many bytes of a file. They contain the key of our metadata, because the header of a
# safetensors file begins with the metadata.
_FIRST_BYTES = 4096
# Maps the prefix of a stored tensor's name to the attribute of `Checkpoint` that contains the tensor.
_TENSOR_GROUPS = {"model": "variables", "first_moment": "first_moments", "second_moment": "second_moments"}

Tensors = Mapping[str, NDArray[Any]]
# The dtype name, the shape and the CRC-32 of a tensor, as stored in the header of a checkpoint.
_TensorDescription = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True)
class Checkpoint:
    """A saved state of a training run, or only the weights of a model.

    Attributes:
        update: The number of updates that the run has done.
        variables: The weights and buffers of the model, by variable name.
        first_moments: The first moments of the optimizer, by variable name. Empty if the checkpoint contains only weights.
        second_moments: The second moments of the optimizer, by variable name. Empty if the checkpoint contains only weights.
        progress: The position of the run: the `packs`, `sequences` and `tokens` that all processes together have read, the
            version of the reading `order`, and the number of `processes` that began the run. Empty if the checkpoint
            contains only weights.
        settings: The `model` (a BertConfig as JSON), the `training` settings of the run, `data` (the sizes of a record),
            `compiled_kernels`, and `run`, the signature with everything that the weights of the run depend on.
    """

    update: int
    variables: Tensors
    first_moments: Tensors = field(default_factory=dict)
    second_moments: Tensors = field(default_factory=dict)
    progress: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


class _StoredProgress(BaseModel, strict=True, frozen=True, extra="forbid"):
    """The schema of `Checkpoint.progress`, unless the checkpoint contains only weights."""

    packs: NonNegativeInt
    order: NonNegativeInt
    processes: PositiveInt
    sequences: NonNegativeInt
    tokens: NonNegativeInt


class _RunSettings(BaseModel, strict=True, frozen=True, extra="forbid"):
    """The schema of `Checkpoint.settings`.

    The contents of the nested objects are checked by the code that uses them.
    """

    model: dict[str, Any] = {}
    training: dict[str, Any] = {}
    data: dict[str, Any] = {}
    task: str = ""
    run: dict[str, Any] = {}
    compiled_kernels: bool = False


class _Header(BaseModel, strict=True, frozen=True, extra="forbid"):
    """The schema of the JSON text in the header of a checkpoint file.

    The field `tensors` contains the dtype, the shape and the CRC-32 of each tensor, by name.
    """

    format_version: Literal[2]
    update: NonNegativeInt
    progress: _StoredProgress | Annotated[dict[str, int], Field(max_length=0)]  # empty if the file contains only weights
    settings: _RunSettings
    tensors: dict[str, tuple[str, tuple[NonNegativeInt, ...], NonNegativeInt]]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint to `folder` atomically, and return the path of the new `update-<number>.safetensors` file.

    Raises:
        FailedError: The file cannot be written.
    """
    tensors = {
        f"{group}/{name}": np.asarray(tensor, order="C")
        for group, members in _TENSOR_GROUPS.items()
        for name, tensor in getattr(checkpoint, members).items()
    }
    state = {
        "format_version": 2,
        "update": checkpoint.update,
        "progress": dict(checkpoint.progress),
        "settings": dict(checkpoint.settings),
        "tensors": {name: _describe_tensor(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(state, allow_nan=False)
    path = Path(folder) / f"update-{checkpoint.update:08d}.safetensors"
    with atomic_file(path) as handle:
        handle.write(save(tensors, metadata={_METADATA_KEY: f"{_format_crc32(text)} {text}"}))
    return path


def _describe_tensor(tensor: NDArray[Any]) -> _TensorDescription:
    """Return the dtype name, the shape and the CRC-32 checksum of a tensor.

    They are stored in the header of a checkpoint, and compared when the tensor is read.
    """
    return tensor.dtype.name, tensor.shape, zlib.crc32(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def _format_crc32(text: str) -> str:
    """Return the CRC-32 checksum of a text as eight hexadecimal digits."""
    return f"{zlib.crc32(text.encode()):0{_CHECKSUM_DIGITS}x}"


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint, and verify the dtype, the shape and the checksum of every tensor.

    Raises:
        InputError: The file is missing, damaged, or no checkpoint of gaudi-bert.
    """
    path = Path(path)
    state = _read_header(path)
    try:
        with explain_os_errors(path, "read"), safe_open(check_regular_file(path), framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
        actual, written = {name: _describe_tensor(tensor) for name, tensor in tensors.items()}, state.tensors
        for name in [*written, *actual]:
            if name not in actual or name not in written or actual[name] != written[name]:
                raise ValueError(f"the checksum of {name} does not match")
        return Checkpoint(
            update=state.update,
            progress=dict(state.progress),
            settings=state.settings.model_dump(exclude_unset=True),
            **{
                members: {name[len(group) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{group}/")}
                for group, members in _TENSOR_GROUPS.items()
            },
        )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _damaged_checkpoint_error(path, " ".join(str(error).split())) from error


def _damaged_checkpoint_error(path: Path, reason: str) -> InputError:
    """Return the error for a checkpoint file that is damaged or incomplete."""
    return InputError(f"{path}: the file is not a complete checkpoint of gaudi-bert ({reason}); use an earlier checkpoint")


def read_checkpoint_identity(path: Path) -> str:
    """Return a hexadecimal string that identifies the content of a checkpoint.

    It is the checksum of the header, which contains the checksums of all tensors, so the tensors need not be read.
    """
    return _read_header_text(path)[:_CHECKSUM_DIGITS]


class RunStartConditions(NamedTuple):
    """The number of processes that began a run, and whether the run uses compiled kernels."""

    processes: int
    is_compiled: bool


def read_run_start_conditions(checkpoint_folder: Path) -> RunStartConditions | None:
    """Return the number of processes that began a run, and whether the run uses compiled kernels.

    Both are read from the newest checkpoint in the folder that has an intact header.

    Returns:
        Both values, or None if there is no such checkpoint or it contains only weights.
    """
    state = _read_newest_header(checkpoint_folder)
    if state is None or not isinstance(state.progress, _StoredProgress):
        return None
    return RunStartConditions(state.progress.processes, state.settings.compiled_kernels)


def read_newest_settings(folder: Path) -> Mapping[str, Any] | None:
    """Return the settings stored in the newest checkpoint of `folder`. Return None if no checkpoint has an intact header."""
    state = _read_newest_header(folder)
    return None if state is None else state.settings.model_dump(exclude_unset=True)


def _read_newest_header(folder: Path) -> _Header | None:
    """Return the newest intact checkpoint header in `folder`. Return None if no header is intact."""
    for path in reversed(_list_checkpoints(folder)):
        try:
            return _read_header(path)
        except InputError:
            continue  # no warning here, because `_read_newest_checkpoint` warns of damaged files
    return None


def is_checkpoint(path: Path) -> bool:
    """Return whether the first bytes of a file identify it as a gaudi-bert checkpoint.

    The rest of the file may be damaged. For safetensors files of other tools, return False.

    Raises:
        InputError: The file is missing or cannot be read.
    """
    with explain_os_errors(path, "read"), open_file(path) as handle:
        return f'"{_METADATA_KEY}":'.encode() in handle.read(_FIRST_BYTES)


def _read_header_text(path: Path) -> str:
    """Return the text in the header of a checkpoint, which consists of a checksum, a space and JSON.

    Raises:
        InputError: The file cannot be read, is no safetensors file, or was written by another tool.
    """
    try:
        with explain_os_errors(path, "read"), safe_open(check_regular_file(path), framework="np") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise _damaged_checkpoint_error(path, " ".join(str(error).split())) from error
    if _METADATA_KEY not in metadata:
        raise _damaged_checkpoint_error(path, "its header was written by another tool")
    return str(metadata[_METADATA_KEY])


def _read_header(path: Path) -> _Header:
    """Parse the header of a checkpoint, and verify its checksum and its schema.

    Raises:
        InputError: The header is damaged.
    """
    written, _, text = _read_header_text(path).partition(" ")
    if written != _format_crc32(text):
        raise _damaged_checkpoint_error(path, "the checksum of its header does not match")
    try:
        return _Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        position = ".".join(str(part) for part in first["loc"] if not str(part).startswith("_"))
        raise _damaged_checkpoint_error(path, f"in its header, {position or 'JSON'}: {first['msg']}") from error


def _list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint files in `folder`, sorted from the oldest to the newest.

    Return an empty list if the folder does not exist.
    """
    return sorted(Path(folder).glob(CHECKPOINT_NAMES))


def find_checkpoint(path: Path | str) -> Path:
    """Return the path of a checkpoint file. If `path` is a folder, search it for the newest checkpoint.

    If the folder itself contains no checkpoint, search its subfolder `checkpoints`.

    Raises:
        InputError: There is no checkpoint.
    """
    path = Path(path)
    if path.is_file():
        return path
    for folder in (path, path / "checkpoints"):
        files = _list_checkpoints(folder)
        if files:
            return files[-1]
    raise InputError(
        f"{path}: the folder contains no checkpoint; pass an update-*.safetensors file, or the folder of a training run"
    )


def _read_newest_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Read the newest intact checkpoint in `folder`. Call `warn` with a message for each newer checkpoint that is damaged.

    Returns:
        The checkpoint, or None if the folder contains no checkpoints.

    Raises:
        InputError: There are checkpoints, but all of them are damaged.
    """
    files = _list_checkpoints(folder)
    for path in reversed(files):
        try:
            return read_checkpoint(path)
        except InputError as error:
            warn(f"warning: {error}")
    if files:
        raise InputError(f"{folder}: none of the {len(files)} checkpoints can be read; train again with --overwrite")
    return None


def remove_old_checkpoints(folder: Path, keep_newest: int) -> None:
    """Remove all checkpoints from a folder except the newest `keep_newest`."""
    names = fnmatch.filter(list_names(folder), CHECKPOINT_NAMES)
    with explain_os_errors(folder, "remove"):
        remove_files(*(folder / name for name in names[: max(0, len(names) - keep_newest)]))


# --- Resuming a run from its newest intact checkpoint
#
# The first process reads the checkpoint and sends its content to the others, so that the folder need not be shared between
# hosts. The position in the data is a number of packs, so that any number of processes can continue in the same order.


@dataclass(frozen=True)
class Progress:
    """Counts the weight updates that a run has done, and the packs, sequences and tokens that it has read.

    The numbers count the work of all processes together. Padding is not counted as tokens.
    """

    update: int = 0
    packs: int = 0
    sequences: int = 0
    tokens: int = 0


# A finished run may be resumed with a larger number of updates, so this setting may differ from the stored one.
_CHANGEABLE_SETTING = "settings.training.updates"


def restore_newest_checkpoint(
    checkpoint_folder: Path, model: Model, updates: Updates, run_signature: Mapping[str, Any], say: Callable[[str], None]
) -> Progress:
    """Load the newest intact checkpoint into the model and the optimizer, and return the progress of the run.

    Without a checkpoint, nothing is loaded, and the run starts from the beginning.

    Args:
        checkpoint_folder: The folder with the checkpoints of the run.
        model: The model whose variables are set.
        updates: The updates whose moments are set.
        run_signature: The signature of the run. It must equal the stored one, except for the number of updates.
        say: A function that shows a line to the user.

    Returns:
        The position to continue from.

    Raises:
        InputError: All checkpoints are damaged, or the newest intact one belongs to another run, another model or another
            reading order.
    """
    checkpoint = _read_newest_checkpoint(checkpoint_folder, say)
    if checkpoint is None:
        return Progress()
    progress = checkpoint.progress
    if progress.get("order") != ORDER_VERSION:
        raise InputError(
            f"{checkpoint_folder}: the checkpoint uses reading order {short_repr(progress.get('order'))}, but this version "
            f"of gaudi-bert uses reading order {ORDER_VERSION}; train again with --overwrite"
        )
    shapes, buffers = model.variable_shapes(), model.persistent_buffers()
    trained = {name: shape for name, shape in shapes.items() if name not in buffers}
    for needed, values in (
        (shapes, checkpoint.variables),
        (trained, checkpoint.first_moments),
        (trained, checkpoint.second_moments),
    ):
        problem = find_shape_mismatch(needed, values)
        if problem is not None:
            raise InputError(
                f"{checkpoint_folder}: the checkpoint belongs to another model: {problem}; use the model settings with "
                "which it was trained"
            )
    difference = describe_first_difference(
        checkpoint.settings.get("run", {}), run_signature, "in this run", ignored_key=_CHANGEABLE_SETTING
    )
    if difference is not None:
        raise InputError(
            f"{checkpoint_folder}: the checkpoint belongs to another run ({difference}); remove it, or train with "
            "--overwrite"
        )
    model.load_variables(checkpoint.variables)
    updates.load_moments(checkpoint.first_moments, checkpoint.second_moments)
    return Progress(checkpoint.update, progress["packs"], progress["sequences"], progress["tokens"])


def broadcast_state(progress: Progress, model: Model, updates: Updates, communicator: Communicator) -> Progress:
    """Copy the variables, the optimizer's moments and the progress from the first process to all other processes.

    Every process calls this at the same time.

    Returns:
        The progress of the first process.
    """
    if communicator.size == 1:
        return progress
    shared = communicator.sum_array(np.array(astuple(progress if communicator.is_first else Progress()), np.float64))
    model.load_variables(communicator.broadcast(model.copy_variables()))
    updates.load_moments(*(communicator.broadcast(moments) for moments in updates.copy_moments()))
    return Progress(*(int(value) for value in shared))
