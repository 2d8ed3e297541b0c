"""Where training and evaluation data comes from: a packed folder, plain unpacked records, or those packed on the fly.

Every size of packed data is taken from its metadata; those of unpacked records from their first record. An unpacked sequence
is fed to the model as a pack of one sequence, so both kinds go through the same graph. What does not fit the model is
refused before anything is built.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.packed import METADATA_NAME, Metadata
from gaudi_bert.artefacts.store.mirrored_folder import fetch, release, shown
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import open_file
from gaudi_bert.model.config import BertConfig
from gaudi_bert.records.files import find_vocabulary, list_record_files
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.read.on_the_fly import OnTheFlyGroup
from gaudi_bert.records.schema import PackedSchema, RecordError, UnpackedSchema, check_features, unpacked_schema_of
from gaudi_bert.records.wire.example import decode_example
from gaudi_bert.records.wire.framing import read_records


@dataclass(frozen=True)
class _SourceFile:
    """One TFRecord file.

    `packs` is None where nothing says how many there are.
    """

    path: Path
    packs: int | None


@dataclass(frozen=True)
class DataSource:
    """Records and their sizes.

    Attributes:
        path: the folder (or file) as it was given.
        schema: names, types and lengths of the features of a record.
        files: the shards, in the order of the metadata or by name.
        packing_factor: sequences per record on average; 1 when unpacked.
        vocabulary_size: None where it is not recorded.
        identity: what distinguishes these records from others, for the settings of a run.
        efficiency: real tokens per slot, on average; None where nothing says it.
        on_the_fly: groups of unpacked files that are packed while training; `files` is then empty.
        cache: of shards that lie in an object store; the paths of `files` are then those of their copies.
    """

    path: Path
    schema: PackedSchema | UnpackedSchema
    files: tuple[_SourceFile, ...]
    packing_factor: float
    vocabulary_size: int | None
    identity: str
    efficiency: float | None = None
    on_the_fly: tuple[OnTheFlyGroup, ...] = ()
    cache: ShardCache | None = None

    @property
    def is_packed(self) -> bool:
        """Whether records are packs; otherwise each is one sequence."""
        return isinstance(self.schema, PackedSchema)

    @property
    def depth(self) -> int:
        """Most sequences of a record; 1 when unpacked."""
        return self.schema.depth if isinstance(self.schema, PackedSchema) else 1

    @property
    def packs(self) -> int | None:
        """Records in all files; None where nothing says so."""
        if self.on_the_fly:
            return sum(group.packs for group in self.on_the_fly)
        counts = [file.packs for file in self.files if file.packs is not None]
        return sum(counts) if len(counts) == len(self.files) else None

    def epoch_packs(self) -> int:
        """Records in all files, counted by reading them where nothing says it."""
        return self.packs if self.packs is not None else self.count_packs(sys.maxsize)

    def local(self, file: _SourceFile) -> Path:
        """Where a file can be read now."""
        if self.cache is not None:
            self.cache.bring([file.path])
        return file.path

    def count_packs(self, limit: int) -> int:
        """Records in all files, counted by reading them, but no further than `limit`."""
        records = (record for file in self.files for record in read_records(file.path))
        return sum(1 for _ in itertools.islice(records, limit))


def open_source(path: Path | str) -> DataSource:
    """Find out what lies at `path`: a packed folder, or unpacked records (a folder, a file or a glob)."""
    path = Path(path)
    sibling = path.resolve().with_name(f"{path.resolve().name}_metadata.json")
    if path.is_dir() and ((path / METADATA_NAME).exists() or sibling.exists()):
        return _packed_source(path, read_metadata(path))
    return _unpacked_source(path)


def open_stored_source(path: Path, metadata: Metadata, cache: ShardCache) -> DataSource:
    """A packed folder in an object store, whose shards are fetched as they are read."""
    table = metadata.shard_table
    files = tuple(_SourceFile(cache.folder / table.name(shard), packs) for shard, packs in enumerate(table.packs.tolist()))
    return replace(_packed(path, metadata, files), cache=cache)


def _packed_source(path: Path, metadata: Metadata) -> DataSource:
    files, table = [], metadata.shard_table
    for shard, (packs, right) in enumerate(zip(table.packs.tolist(), table.bytes.tolist(), strict=True)):
        file = path / table.name(shard)
        if not file.is_file():
            raise InputError(f"{file}: the shard is missing, the metadata names it; write the packed data again")
        size = file.stat().st_size
        if size != right:
            raise InputError(f"{file}: has {size:,} bytes, the metadata says {right:,}; write the packed data again")
        files.append(_SourceFile(file, packs))
    return _packed(path, metadata, tuple(files))


def _packed(path: Path, metadata: Metadata, files: tuple[_SourceFile, ...]) -> DataSource:
    return DataSource(
        path=path,
        schema=PackedSchema.of(metadata),
        files=files,
        packing_factor=metadata.packing_factor,
        vocabulary_size=metadata.vocabulary.size if metadata.vocabulary is not None else None,
        identity=metadata.identity,
        efficiency=metadata.efficiency,
    )


def _unpacked_source(path: Path) -> DataSource:
    found = list_record_files(path)
    first = next(read_records(found[0].path), None)
    if first is None:
        raise InputError(f"{found[0].path}: holds no records; remove it, or give the right folder")
    try:
        features = decode_example(first)
        if "next_sentence_positions" in features:
            raise RecordError(f"holds packs, but there is no {METADATA_NAME} beside it; write the packed data to its end")
        schema = unpacked_schema_of(features)
        check_features(features, schema)
    except RecordError as error:
        raise InputError(f"{found[0].path}: record 0: {error}") from error
    vocabulary = find_vocabulary(path)
    return DataSource(
        path=path,
        schema=schema,
        files=tuple(_SourceFile(file.path, None) for file in found),
        packing_factor=1.0,
        vocabulary_size=sum(1 for _ in open_file(vocabulary)) if vocabulary is not None else None,
        identity=_digest([[file.name, file.bytes] for file in found]),
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode("utf-8")).hexdigest()


def check_fits(source: DataSource, config: BertConfig) -> None:
    """Refuse data that the model cannot take."""
    if source.schema.max_sequence_length > config.max_position_embeddings:
        raise InputError(
            f"{source.path}: its sequences have up to {source.schema.max_sequence_length} positions, the model has "
            f"model.max_position_embeddings = {config.max_position_embeddings}; give the model at least as many"
        )
    if source.vocabulary_size is not None and source.vocabulary_size > config.vocab_size:
        raise InputError(
            f"{source.path}: its vocabulary has {source.vocabulary_size:,} tokens, the model has "
            f"model.vocab_size = {config.vocab_size:,}; give the model at least as many, or the data of its vocabulary"
        )


# --- Packed shards of an object store on the local disk: fetched when they are first needed, several at once, within a bound
#
# Packs are read from all shards of a process side by side, so those of an epoch have to be on the disk together; with
# several processes they change with the epoch. The shards that were used longest ago are removed first. The state of a run
# is a number of packs, so nothing of this is stored: a run that is resumed fetches what it needs.


class ShardCache:
    """The shards of a mirrored folder.

    Args:
        folder: where they are read.
        sizes: the bytes of each shard, by name, as metadata.json says.
        room: the most bytes of shards that are there at any time.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int], room: int) -> None:
        self.folder = folder
        self._sizes, self._room = sizes, room
        self._lock = threading.Lock()
        self._there: OrderedDict[str, None] = OrderedDict()

    def check_room(self, processes: int) -> None:
        """Refuse an epoch whose shards of one process do not fit together."""
        shared = processes if len(self._sizes) % processes == 0 else 1
        needed = -(-sum(self._sizes.values()) // shared)
        if needed > self._room:
            raise InputError(
                f"{self.folder}: a process reads {needed:,} bytes of shards per epoch, store.cache_bytes is {self._room:,}; "
                "raise it (on Kubernetes kubernetes.scratch, to twice as much), or train with more processes"
            )

    def bring(self, paths: Sequence[Path]) -> list[Path]:
        """Have the copies `paths` on the disk; the copies that had to go for them."""
        with self._lock:
            names = [path.name for path in paths]
            missing = [name for name in names if name not in self._there]
            gone = self._make_room(missing, set(names))
            fetch(*(self.folder / name for name in missing))
            for name in names:
                if not (self.folder / name).exists():
                    raise InputError(f"{shown(self.folder / name)}: no such object; write the packed data again")
                self._there[name] = None
                self._there.move_to_end(name)
            return gone

    def _make_room(self, missing: Sequence[str], needed: set[str]) -> list[Path]:
        gone: list[Path] = []
        held = sum(self._sizes[name] for name in (*missing, *self._there))
        for name in [name for name in self._there if name not in needed]:
            if not missing or held <= self._room:
                break
            del self._there[name]
            gone.append(self.folder / name)
            release(gone[-1])
            held -= self._sizes[name]
        return gone
