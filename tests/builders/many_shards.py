"""A packed folder of very many small shards, and what a process has open of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.shards import index_path, write_index
from gaudi_bert.tfrecords.wire.framing import frame, read_records


def write_many_shards(folder: Path, packed: Path, shards: int, group_shards: int = 32, index: bool = True) -> Path:
    """Shards of one to three packs each, which are those of the folder `packed` over and over."""
    folder.mkdir()
    content = json.loads((packed / "metadata.json").read_text(encoding="utf-8"))
    payloads = [
        payload for path in sorted(packed.glob("*.tfrecord")) if path.stat().st_size for payload in read_records(path)
    ]
    content["groups"] = []
    for group in range(-(-shards // group_shards)):
        sizes: list[list[int]] = []
        for shard in range(group * group_shards, min(shards, (group + 1) * group_shards)):
            frames = [frame(payloads[(3 * shard + pack) % len(payloads)]) for pack in range(1 + shard % 3)]
            (folder / f"packed-{group:05d}-{shard % group_shards:05d}.tfrecord").write_bytes(b"".join(frames))
            sizes.append([len(each) for each in frames])
        if index:
            write_index(index_path(folder, group), [np.array(each, np.uint32) for each in sizes])
        packs_and_bytes = {"packs": [len(each) for each in sizes], "bytes": [sum(each) for each in sizes]}
        content["groups"].append({**packs_and_bytes, "manifest_crc32c": group})
    packs = sum(sum(group["packs"]) for group in content["groups"])
    content["packs"], content["gap"] = packs, packs - content["lower_bound"]
    (folder / "metadata.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def mapped_files(folder: Path) -> int:
    """Files of a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return len({line.split()[-1] for line in lines if str(folder) in line})
