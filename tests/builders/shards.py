"""The shards of a packed folder: as its manifests have them, changed with their sums, and those that are mapped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.base import NOTES_NAME, manifest_path
from gaudi_bert.artefacts.packed import RecordManifest, TableManifest
from gaudi_bert.artefacts.shards import Shard, index_path, write_index
from gaudi_bert.common.crc32c import crc32c, masked_crc32c
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import FRAME_BYTES


def notes_of(packed: Path) -> Path:
    """Where the JSON files of a packed folder are: those of tables have a folder."""
    return packed / NOTES_NAME if (packed / NOTES_NAME).is_dir() else packed


def shards_of(packed: Path) -> list[Shard]:
    """All shards in order."""
    notes = notes_of(packed)
    kind = RecordManifest if notes == packed else TableManifest
    groups = len(sorted(notes.glob("group-*.json")))
    return [shard for group in range(groups) for shard in kind.read(manifest_path(notes, group)).shards]


def index_entries(payloads: list[bytes]) -> np.ndarray:
    """The part of an index that describes the shard of these records, uint32 [records, 2]."""
    entries = [(len(payload) + FRAME_BYTES, masked_crc32c(crc32c(payload))) for payload in payloads]
    return np.array(entries, np.uint32).reshape(-1, 2)


def mend_sums(packed: Path, group: int = 0) -> None:
    """Let the manifest of a group, its index and metadata.json agree with the shards as they are now."""
    path = manifest_path(notes_of(packed), group)
    stored = path.with_name("metadata.json")
    manifest = json.loads(path.read_text())
    for shard in manifest["shards"]:
        data = (packed / shard["name"]).read_bytes()
        shard.update(bytes=len(data), crc32c=crc32c(data))
    if "index_crc32c" in manifest:
        payloads = [list(read_records(packed / shard["name"])) if shard["bytes"] else [] for shard in manifest["shards"]]
        manifest["index_crc32c"] = write_index(index_path(packed, group), list(map(index_entries, payloads)))
        for shard, each in zip(manifest["shards"], payloads, strict=True):
            shard["packs"] = len(each)
    path.write_text(json.dumps(manifest))
    metadata = json.loads(stored.read_text())
    listed = {key: [shard[key] for shard in manifest["shards"]] for key in ("packs", "bytes")}
    metadata["groups"][group] = {**listed, "manifest_crc32c": crc32c(path.read_bytes())}
    stored.write_text(json.dumps(metadata))


def mapped_files(folder: Path) -> int:
    """Files of a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return len({line.split()[-1] for line in lines if str(folder) in line})
