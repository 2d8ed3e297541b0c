"""Where training and evaluation data comes from: a packed folder, or plain unpacked records.

Every size of packed data is taken from its metadata; those of unpacked records from their first record. An unpacked sequence
is fed to the model as a pack of one sequence, so both kinds go through the same graph. What does not fit the model is
refused before anything is built. Of an object store, packed shards are fetched ahead of the reader, all else before.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gaudi_bert.artefacts.base import METADATA_NAME
from gaudi_bert.artefacts.packed import Metadata, pack_kind
from gaudi_bert.artefacts.store.mirrored_folder import fetch, mirrored
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import in_store, open_file
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.reading.global_order import MOST_STREAMS, streams_of
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.tfrecords.files import find_vocabulary, list_record_files, open_inputs
from gaudi_bert.tfrecords.packed_folder import ShardPaths, check_before_reading, open_packs, read_metadata
from gaudi_bert.tfrecords.random_access import RecordFiles, ShardCache
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import PackedSchema, RecordError, UnpackedSchema, check_features, unpacked_schema_of


@dataclass(frozen=True)
class DataSource:
    """Records and their sizes.

    Attributes:
        files: the shards, in the order of the metadata or by name; built on access.
        packing_factor: sequences per record on average; 1 when unpacked.
        identity: what distinguishes these records from others, for the settings of a run.
        cache: of shards in an object store; `path` and `files` are then those of their copies.
    """

    path: Path
    schema: PackedSchema | UnpackedSchema
    files: Sequence[Path]
    packing_factor: float
    vocabulary_size: int | None
    identity: str
    metadata: Metadata | None = None
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
        """Records in all files; None where unknown."""
        return self.metadata.packs if self.metadata is not None else None

    @property
    def mean_tokens(self) -> float | None:
        """Tokens of a sequence, on average; None where unknown."""
        return self.metadata.tokens / self.metadata.sequences if self.metadata is not None else None

    @property
    def streams(self) -> int:
        """The number of shards that are read at once."""
        return streams_of(self.metadata.shard_multiple if self.metadata is not None else 1)

    def reading_cost(self, processes: int) -> str | None:
        """Return a note on what so many processes cost that have no streams of their own; None where each has."""
        readers = processes // math.gcd(self.streams, processes)
        if readers == 1 or self.metadata is None:
            return None
        multiple = -(-self.streams // processes) * processes
        multiple, gain = (multiple, "once") if multiple <= MOST_STREAMS else (MOST_STREAMS, "less often")
        return (
            f"note: each shard is read by {readers} of the {processes} processes, so that about {readers} times the bytes "
            f"of the packs are read (of a bucket, fetched); `pack --set packing.shard_multiple={multiple}` makes it {gain}"
        )

    def open_packs(self) -> StoredPacks:
        """The records as they are read, by their files and numbers."""
        if self.metadata is None:
            return StoredPacks(RecordFiles(self.files, self.schema), self.streams)
        return open_packs(self.path, self.metadata, self.cache)

    def records_of(self, number: int) -> Iterator[bytes]:
        """The records of one of the files."""
        if self.cache is None:
            yield from read_records(self.files[number])
            return
        self.cache.bring(number)
        try:
            yield from read_records(self.files[number])
        finally:
            self.cache.release(number)

    def count_packs(self, limit: int) -> int:
        """Records in all files, counted by reading them, but no further than `limit`."""
        records = (record for file in self.files for record in read_records(file))
        return sum(1 for _ in itertools.islice(records, limit))


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
            cache = ShardCache(folder, metadata.shard_table, settings.cache_bytes, settings.connections)
            yield _packed_source(folder, metadata, cache)
            return
    with open_inputs(path, settings) as inputs:
        fetch(*inputs.paths)
        yield open_source(inputs.folder)


def open_source(path: Path | str) -> DataSource:
    """Return what `path` is: a packed folder, or unpacked records (a folder, a file or a glob)."""
    path = Path(path)
    if path.is_dir() and pack_kind(path) is not None:
        metadata = read_metadata(path)
        check_before_reading(path, metadata.shard_table)
        return _packed_source(path, metadata)
    return _unpacked_source(path)


def _packed_source(path: Path, metadata: Metadata, cache: ShardCache | None = None) -> DataSource:
    """A packed folder; `cache` fetches its shards as they are read, if the folder mirrors one of an object store."""
    return DataSource(
        path=path,
        schema=PackedSchema.of(metadata),
        files=ShardPaths(path, metadata.shard_table),
        packing_factor=metadata.packing_factor,
        vocabulary_size=metadata.vocabulary.size if metadata.vocabulary is not None else None,
        identity=metadata.identity(),
        metadata=metadata,
        cache=cache,
    )


def _unpacked_source(path: Path) -> DataSource:
    sizes = list_record_files(path)
    files = tuple(sizes)
    first = next(read_records(files[0]), None)
    if first is None:
        raise InputError(f"{files[0]}: holds no records; remove it, or give the right folder")
    try:
        features = decode_example(first)
        if "next_sentence_positions" in features:
            raise RecordError(f"holds packs, but {METADATA_NAME} is missing next to it; finish writing the packed data")
        schema = unpacked_schema_of(features)
        check_features(features, schema)
    except RecordError as error:
        raise InputError(f"{files[0]}: record 0: {error}") from error
    vocabulary = find_vocabulary(path)
    return DataSource(
        path=path,
        schema=schema,
        files=files,
        packing_factor=1.0,
        vocabulary_size=sum(1 for _ in open_file(vocabulary)) if vocabulary is not None else None,
        identity=hashlib.sha256(json.dumps([[file.name, size] for file, size in sizes.items()]).encode("utf-8")).hexdigest(),
    )


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
