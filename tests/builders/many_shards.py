"""A packed folder of very many small shards, and what a process has open of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gaudi_bert.records.wire.framing import frame, read_records
from gaudi_bert.records.wire.shard_index import index_path, write_index


def write_many_shards(folder: Path, packed: Path, shards: int, group_shards: int = 32, index: bool = True) -> Path:
    """Shards of one to three packs each, which are those of the folder `packed` over and over."""
    folder.mkdir()
    content = json.loads((packed / "metadata.json").read_text(encoding="utf-8"))
    payloads = [
        payload for path in sorted(packed.glob("*.tfrecord")) if path.stat().st_size for payload in read_records(path)
    ]
    content["shards"], sizes = [], []
    for shard in range(shards):
        group, number = divmod(shard, group_shards)
        frames = [frame(payloads[(3 * shard + pack) % len(payloads)]) for pack in range(1 + shard % 3)]
        path = folder / f"packed-{group:05d}-{number:05d}.tfrecord"
        path.write_bytes(b"".join(frames))
        content["shards"].append({"name": path.name, "packs": len(frames), "bytes": path.stat().st_size, "crc32c": 1})
        sizes.append([len(each) for each in frames])
    for group in range(0, shards if index else 0, group_shards):
        write_index(index_path(folder, group // group_shards), sizes[group : group + group_shards])
    packs = sum(shard["packs"] for shard in content["shards"])
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
