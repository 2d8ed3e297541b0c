"""What training and its kin read from an object store: packed shards as they are needed, all else copied before."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.names import METADATA_NAME
from gaudi_bert.artefacts.store.location import in_store, url_of
from gaudi_bert.artefacts.store.mirror import Mirror

if TYPE_CHECKING:
    from gaudi_bert.training.input.source import DataSource

__all__ = ["open_data", "weights_here"]

CHECKPOINTS = "update-*.safetensors"


def open_data(place: Path | str, copies: Mirror) -> DataSource:
    """A packed folder, or unpacked records, wherever they lie; as `open_source`.

    Raises:
        InputError: as `open_source`, or nothing is at the URL.
    """
    from gaudi_bert.records.packed_folder import read_metadata
    from gaudi_bert.training.input.shard_cache import ShardCache
    from gaudi_bert.training.input.source import open_source, open_stored_source

    if not in_store(place):
        return open_source(place)
    url = url_of(place)
    if copies.fetch_one(f"{url}/{METADATA_NAME}"):
        folder = copies.copy_of(url)
        metadata = read_metadata(folder)
        sizes = {shard.name: shard.bytes for shard in metadata.shards}
        return open_stored_source(folder, metadata, ShardCache(copies.objects, url, folder, sizes))
    copies.fetch_one(f"{_parent(url)}/vocab.txt")
    return open_source(copies.fetch(url))


def weights_here(place: Path | str, copies: Mirror) -> Path:
    """Weights to read: the newest checkpoint of a run, a checkpoint, or another tool's folder or file, copied if need be.

    Raises:
        InputError: nothing is at the URL.
    """
    if not in_store(place):
        return Path(place)
    url = url_of(place)
    if copies.fetch_one(url):
        for name in ("config.json", "bert_config.json", "vocab.txt"):
            copies.fetch_one(f"{_parent(url)}/{name}")
        _fetch_what_export_looks_for(_parent(_parent(url)), copies)
        return copies.copy_of(url)
    for folder in (url, f"{url}/checkpoints"):
        newest = max(fnmatch.filter(copies.objects.list(folder, only_here=True), CHECKPOINTS), default=None)
        if newest is not None:
            copies.fetch_one(f"{folder}/{newest}")
            _fetch_what_export_looks_for(_parent(f"{folder}/"), copies)
            return copies.copy_of(url)
    return copies.fetch(url)


def _fetch_what_export_looks_for(run: str, copies: Mirror) -> None:
    """The settings of a run, and the vocabulary of the examples beside it."""
    if not run.endswith(":/"):
        copies.fetch_one(f"{run}/settings.yaml")
        copies.fetch_one(f"{_parent(run)}/examples/vocab.txt")


def _parent(url: str) -> str:
    return url.rstrip("/").rpartition("/")[0]
