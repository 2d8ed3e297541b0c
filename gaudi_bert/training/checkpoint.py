"""Checkpoints: one file each, whole or absent, checked on reading, the newest few kept.

A checkpoint is a safetensors file (8 bytes: length of the header; the header, JSON; the tensors' bytes, little-endian, one
after the other), so any tool that knows the format can read it. Tensors are named `model/<variable>`,
`first_moment/<variable>` and `second_moment/<variable>`. The header's `__metadata__` holds one JSON text with the update,
the position in the data, the settings, and the CRC-32 of every tensor and of the header, which the format itself lacks: a
checkpoint that was cut short or has flipped bits is recognised, named, and the one before it is used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import atomic_file, explained_os_errors

__all__ = [
    "Checkpoint",
    "checkpoint_files",
    "checkpoint_identity",
    "find_checkpoint",
    "is_checkpoint",
    "newest_settings",
    "read_checkpoint",
    "read_newest",
    "remove_old_checkpoints",
    "write_checkpoint",
]

FORMAT_VERSION = 1
METADATA_KEY = "gaudi_bert"
CHECKSUM_KEY = "crc32"
DTYPE_CODES = {"float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64"}
DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in DTYPE_CODES.items()}
MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training run after `update` updates.

    Attributes:
        update: updates done.
        variables: the model, by variable name.
        first_moments: the optimiser's m, by variable name; empty in a checkpoint of weights only.
        second_moments: the optimiser's v, by variable name.
        progress: where the run stood: packs read by each process, processes, sequences and tokens seen.
        settings: `model` (BertConfig as JSON) and `training` as the run was given them, `data` (the sizes of a record), and
            `compiled_kernels`.
    """

    update: int
    variables: Mapping[str, np.ndarray]
    first_moments: Mapping[str, np.ndarray] = field(default_factory=dict)
    second_moments: Mapping[str, np.ndarray] = field(default_factory=dict)
    progress: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write `update-<number>.safetensors` into `folder`, whole or not at all.

    Raises:
        FailedError: the disk is full or the folder not writable.
    """
    groups = {
        "model": checkpoint.variables,
        "first_moment": checkpoint.first_moments,
        "second_moment": checkpoint.second_moments,
    }
    tensors = {
        f"{group}/{name}": np.ascontiguousarray(tensor).astype(tensor.dtype.newbyteorder("<"), copy=False)
        for group, members in groups.items()
        for name, tensor in members.items()
    }
    header = _header(checkpoint, tensors)
    path = Path(folder) / f"update-{checkpoint.update:08d}.safetensors"
    with atomic_file(path) as handle:
        handle.write(len(header).to_bytes(8, "little"))
        handle.write(header)
        for tensor in tensors.values():
            handle.write(tensor.reshape(-1).view(np.uint8).data)
    return path


def _header(checkpoint: Checkpoint, tensors: Mapping[str, np.ndarray]) -> bytes:
    entries: dict[str, Any] = {}
    checksums: dict[str, int] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPE_CODES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        checksums[name] = zlib.crc32(tensor.reshape(-1).view(np.uint8).data)
    state = {
        "format_version": FORMAT_VERSION,
        "update": checkpoint.update,
        "progress": dict(checkpoint.progress),
        "settings": dict(checkpoint.settings),
        "crc32": checksums,
    }
    text = json.dumps(state, allow_nan=False)
    entries["__metadata__"] = {METADATA_KEY: text, CHECKSUM_KEY: _header_checksum(entries, text)}
    header = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    return header + b" " * (-len(header) % 8)


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read and check a checkpoint.

    Raises:
        InputError: missing, not a checkpoint of ours, cut short, or its bytes have changed since it was written.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint; give an update-*.safetensors file, or a folder that holds some")
    with explained_os_errors(path, "read"):
        content = path.read_bytes()
    try:
        entries, begin = _parse_header(content)
        metadata = entries.pop("__metadata__")
        if metadata[CHECKSUM_KEY] != _header_checksum(entries, metadata[METADATA_KEY]):
            raise ValueError("the checksum of its header does not match")
        state = json.loads(metadata[METADATA_KEY])
        tensors = {name: _tensor(name, entry, content, begin, state["crc32"][name]) for name, entry in entries.items()}
        if begin + sum(tensor.nbytes for tensor in tensors.values()) != len(content):
            raise ValueError("bytes after the last tensor")
        return Checkpoint(
            update=int(state["update"]),
            variables=_group(tensors, "model"),
            first_moments=_group(tensors, "first_moment"),
            second_moments=_group(tensors, "second_moment"),
            progress=state["progress"],
            settings=state["settings"],
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0] if error.args else error}" if not isinstance(error, KeyError) else f"no {error} in it"
        raise InputError(f"{path}: not a whole checkpoint of gaudi-bert ({reason}); use the one before it") from error


def checkpoint_identity(path: Path) -> str:
    """What distinguishes a checkpoint from others: the checksum of its header, which holds those of all tensors.

    Raises:
        InputError: as `read_checkpoint`, as far as the header shows it.
    """
    return str(_read_metadata(path)[CHECKSUM_KEY])


def newest_settings(folder: Path) -> Mapping[str, Any] | None:
    """The settings in the newest checkpoint of `folder` whose header is whole; None without such a checkpoint."""
    for path in reversed(checkpoint_files(folder)):
        try:
            settings: Mapping[str, Any] = json.loads(_read_metadata(path)[METADATA_KEY])["settings"]
            return settings
        except InputError:
            continue  # it will be told of when it is read as a whole
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether the file is one of ours, whole or not, by its header; other safetensors files are not."""
    with explained_os_errors(path, "read"), open(path, "rb") as handle:
        start = handle.read(8)
        length = int.from_bytes(start, "little")
        header = handle.read(min(length, MAX_HEADER_BYTES))
    return f'"{METADATA_KEY}":'.encode() in header


def _read_metadata(path: Path) -> Mapping[str, str]:
    """The texts in the header: no tensor is read."""
    with explained_os_errors(path, "read"), open(path, "rb") as handle:
        start = handle.read(8)
        header = handle.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES))
    try:
        metadata = _parse_header(start + header)[0]["__metadata__"]
        return {key: metadata[key] for key in (METADATA_KEY, CHECKSUM_KEY)}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a whole checkpoint of gaudi-bert (its header); use the one before it") from error


def _parse_header(content: bytes) -> tuple[dict[str, Any], int]:
    if len(content) < 8:
        raise ValueError("shorter than its header")
    length = int.from_bytes(content[:8], "little")
    if not 2 <= length <= min(len(content) - 8, MAX_HEADER_BYTES):
        raise ValueError("its header's length is impossible")
    entries = json.loads(content[8 : 8 + length].decode("utf-8"))
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    return entries, 8 + length


def _header_checksum(entries: Mapping[str, Any], text: str) -> str:
    """CRC-32 of the tensors' entries and of the state's text, in decimal: the format allows only text here."""
    return str(zlib.crc32(json.dumps([entries, text]).encode("utf-8")))


def _tensor(name: str, entry: dict[str, Any], content: bytes, begin: int, checksum: int) -> np.ndarray:
    first, last = entry["data_offsets"]
    data = memoryview(content)[begin + first : begin + last]
    if len(data) != last - first:
        raise ValueError(f"cut short at {name}")
    if zlib.crc32(data) != checksum:
        raise ValueError(f"the checksum of {name} does not match")
    return np.frombuffer(data, DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _group(tensors: Mapping[str, np.ndarray], group: str) -> dict[str, np.ndarray]:
    prefix = f"{group}/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first; none when it does not exist."""
    return sorted(Path(folder).glob("update-*.safetensors"))


def find_checkpoint(path: Path | str) -> Path:
    """The checkpoint that `path` means: the file itself, or the newest in the folder or in its `checkpoints/`.

    Raises:
        InputError: there is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    for folder in (path, path / "checkpoints"):
        files = checkpoint_files(folder)
        if files:
            return files[-1]
    raise InputError(f"{path}: no checkpoint there; give an update-*.safetensors file, or the folder of a training run")


def read_newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint in `folder` that is whole; damaged ones are passed to `warn` and skipped.

    Returns:
        None when the folder holds no checkpoint at all.

    Raises:
        InputError: there are checkpoints and all of them are damaged.
    """
    files = checkpoint_files(folder)
    for path in reversed(files):
        try:
            return read_checkpoint(path)
        except InputError as error:
            warn(f"warning: {error}")
    if files:
        raise InputError(f"{folder}: all {len(files)} checkpoints are damaged; start anew with --overwrite")
    return None


def remove_old_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    files = checkpoint_files(folder)
    for path in files[: max(0, len(files) - keep)]:
        with explained_os_errors(path, "remove"):
            path.unlink()
