"""Writes a checkpoint as version 0.1 of this package wrote it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

from gaudi_bert.training.checkpoint import Checkpoint


def write_first_edition(folder: Path, checkpoint: Checkpoint) -> Path:
    """`update-<number>.safetensors`, all tensors float32."""
    groups = {
        "model": checkpoint.variables,
        "first_moment": checkpoint.first_moments,
        "second_moment": checkpoint.second_moments,
    }
    tensors = {f"{group}/{name}": np.asarray(value, "<f4") for group, each in groups.items() for name, value in each.items()}
    entries, end = {}, 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    state = {
        "format_version": 1,
        "update": checkpoint.update,
        "progress": dict(checkpoint.progress),
        "settings": dict(checkpoint.settings),
        "crc32": {name: zlib.crc32(tensor.tobytes()) for name, tensor in tensors.items()},
    }
    text = json.dumps(state)
    checksum = str(zlib.crc32(json.dumps([entries, text]).encode()))
    header = json.dumps({**entries, "__metadata__": {"gaudi_bert": text, "crc32": checksum}}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    path = folder / f"update-{checkpoint.update:08d}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(value.tobytes() for value in tensors.values()))
    return path
