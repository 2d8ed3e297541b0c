"""group-GGGGG.json: what was written of one group. It is written after the shards of the group, so they are whole then."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gaudi_bert.artefacts.metadata import Shard
from gaudi_bert.artefacts.model import Artefact, Count, Positive, Sha256, read_artefact
from gaudi_bert.artefacts.names import manifest_path
from gaudi_bert.common.files import write_json

__all__ = ["GroupManifest", "read_manifest", "write_manifest"]


class GroupManifest(Artefact):
    """One group of a packed folder.

    Attributes:
        plan_sha256: the plan by which it was written.
        counts: sequences of each length; the first entry is length 1.
    """

    format_version: Literal[1] = 1
    plan_sha256: Sha256
    group: Count
    sequences: Positive
    packs: Positive
    tokens: Positive
    counts: tuple[Count, ...]
    shards: tuple[Shard, ...]


def read_manifest(folder: Path, group: int) -> GroupManifest:
    """The manifest of `group`.

    Raises:
        InputError: it is missing or damaged.
    """
    return read_artefact(manifest_path(folder, group), GroupManifest, "remove it and write the folder again")


def write_manifest(folder: Path, manifest: GroupManifest) -> None:
    """Write the manifest of a group whose shards are all there."""
    write_json(manifest_path(folder, manifest.group), manifest.as_json())
