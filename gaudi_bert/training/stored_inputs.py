"""What training reads from an object store: packed shards are fetched as they are needed, all else before."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gaudi_bert.artefacts.base import METADATA_NAME, VocabularyInfo
from gaudi_bert.artefacts.packed import Metadata
from gaudi_bert.artefacts.store.mirrored_folder import fetch, fetch_below, files_in, mirrored, mirrored_bucket
from gaudi_bert.common.files import in_store, read_text, write_json, write_text
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.tfrecords.files import open_inputs
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.tfrecords.shard_cache import ShardCache
from gaudi_bert.training.checkpoint import CHECKPOINT_NAMES
from gaudi_bert.training.input.source import DataSource, open_source, packed_source


@contextmanager
def open_data(path: Path | str, store: StoreSettings | None = None) -> Iterator[DataSource]:
    """A packed folder, or unpacked records, on a disk or in an object store; as `open_source`."""
    if not in_store(path):
        yield open_source(path)
        return
    settings = store or StoreSettings()
    with mirrored(Path(path), settings) as folder:
        fetch(folder / METADATA_NAME)
        if (folder / METADATA_NAME).exists():
            metadata = read_metadata(folder)
            with closing(ShardCache(folder, metadata.shard_table, settings.cache_bytes, settings.connections)) as cache:
                yield packed_source(folder, metadata, cache)
            return
    with open_inputs(path, settings) as inputs:
        fetch(*inputs.paths)
        yield open_source(inputs.folder)


@contextmanager
def local_weights(path: Path | str, store: StoreSettings | None = None) -> Iterator[Path]:
    """Weights to read: the newest checkpoint of a run, a checkpoint, or another tool's folder or file, copied if need be."""
    with mirrored_bucket(path, store) as weights:
        if in_store(path):
            _fetch_weights(weights)
        yield weights


def _fetch_weights(path: Path) -> None:
    fetch(path)
    if path.is_file():
        fetch(*(path.parent / name for name in ("config.json", "bert_config.json", "vocab.txt")))
        _fetch_what_export_looks_for(path.parent.parent)
        return
    for folder in (path, path / "checkpoints"):
        newest = max(fnmatch.filter(files_in(folder), CHECKPOINT_NAMES), default=None)
        if newest is not None:
            fetch(folder / newest)
            _fetch_what_export_looks_for(folder.parent)
            return
    fetch_below(path)


def _fetch_what_export_looks_for(run: Path) -> None:
    """The settings of a run, and the vocabulary of the examples next to it; above a bucket, nothing is fetched."""
    fetch(*(run / name for name in ("settings.yaml", "vocab.txt", "tokenizer_config.json")))
    fetch(run.parent / "examples" / "vocab.txt")


def copy_tokenizer(data: Path, run: Path, lower_case: bool, positions: int, store: StoreSettings | None) -> None:
    """Copy the vocabulary of packed data into the folder of a run, where one near the data matches it.

    So a run's folder is what `finetune --model` takes. Looked into are the folder of the data, those above it, and the
    `examples/` in these.
    """
    with mirrored_bucket(data, store) as packed:
        fetch(packed / METADATA_NAME)
        known = Metadata.read(packed).vocabulary if (packed / METADATA_NAME).is_file() else None
        if known is None:
            return
        above = (packed, *packed.resolve().parents[:3])
        for file in (folder / below / "vocab.txt" for folder in above for below in (".", "examples")):
            fetch(file)
            if file.is_file() and VocabularyInfo.of(file) == known:
                write_text(run / "vocab.txt", read_text(file))
                content = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case, "model_max_length": positions}
                write_json(run / "tokenizer_config.json", content)
                return
