"""Open packed or unpacked pretraining records for training and evaluation, and determine their sizes.

A source is a folder of packed records, whose metadata states its sizes, or unpacked records, whose first record determines
the sizes. Data that does not fit the model is rejected before a model is built. If the data is in an object store, packed
shards are fetched shortly before they are read, and all other files are fetched when the data is opened.
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
from gaudi_bert.artefacts.mirrored_folder import download_missing_files, mirror_folder
from gaudi_bert.artefacts.packed import RecordMetadata, detect_pack_format
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import is_in_store, open_file
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.reading.global_order import MAX_STREAMS, choose_shard_stream_count
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.tfrecords.random_access import (
    RecordFiles,
    ShardCache,
    ShardPaths,
    check_shards_exist,
    open_packs,
)
from gaudi_bert.tfrecords.scan import find_vocabulary, list_record_files, open_inputs
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import PackedSchema, RecordError, UnpackedSchema, check_features, infer_unpacked_schema


@dataclass(frozen=True)
class RecordSource:
    """Opened pretraining records. Each record is either a pack or a single unpacked sequence.

    Attributes:
        path: The folder or file of the records on this machine.
        schema: The features of a record and their sizes.
        files: The record files.
        packing_factor: The mean number of sequences per record. It is 1 for unpacked records.
        vocabulary_size: The number of tokens in the vocabulary, or None if it is unknown.
        identity: A hexadecimal string that differs between different records. It is part of the signature of a run.
        metadata: The metadata of a packed folder. None for unpacked records.
        cache: Fetches shards from an object store. `path` and `files` are then the local copies. None for local data.
    """

    path: Path
    schema: PackedSchema | UnpackedSchema
    files: Sequence[Path]
    packing_factor: float
    vocabulary_size: int | None
    identity: str
    metadata: RecordMetadata | None = None
    cache: ShardCache | None = None

    @property
    def is_packed(self) -> bool:
        """Whether each record is a pack. If False, each record is a single sequence."""
        return isinstance(self.schema, PackedSchema)

    @property
    def depth(self) -> int:
        """The maximum number of sequences in a record. It is 1 for unpacked records."""
        return self.schema.depth if isinstance(self.schema, PackedSchema) else 1

    @property
    def pack_count(self) -> int | None:
        """The number of records in all files, or None if it is unknown."""
        return self.metadata.packs if self.metadata is not None else None

    @property
    def mean_tokens(self) -> float | None:
        """The mean number of tokens in a sequence, or None if it is unknown."""
        return self.metadata.tokens / self.metadata.sequences if self.metadata is not None else None

    @property
    def parallel_stream_count(self) -> int:
        """The number of record files that are read at the same time."""
        return choose_shard_stream_count(self.metadata.shard_multiple if self.metadata is not None else 1)

    def format_shared_shards_note(self, processes: int) -> str | None:
        """If several processes must read the same shards, return a note for the user on how often the data is read.

        Return None if every process reads its own shards, or if the records are unpacked.
        """
        readers = processes // math.gcd(self.parallel_stream_count, processes)
        if readers == 1 or self.metadata is None:
            return None
        multiple = -(-self.parallel_stream_count // processes) * processes
        multiple, frequency = (multiple, "only once") if multiple <= MAX_STREAMS else (MAX_STREAMS, "less often")
        return (
            f"note: each shard is read by {readers} of the {processes} processes, so about {readers} times the size of "
            f"the packs is read or downloaded; to read each shard {frequency}, pack the data with --set "
            f"packing.shard_multiple={multiple}"
        )

    def open_packs(self) -> StoredPacks:
        """Open the records for random access."""
        if self.metadata is None:
            return StoredPacks(RecordFiles(self.files, self.schema), self.parallel_stream_count)
        return open_packs(self.path, self.metadata, self.cache)

    def read_file_records(self, file_number: int) -> Iterator[bytes]:
        """Yield the encoded records of one file.

        If the file is in an object store, a local copy is fetched first and released afterwards.

        Args:
            file_number: The index of the file in `files`.
        """
        if self.cache is None:
            yield from read_records(self.files[file_number])
            return
        self.cache.download(file_number)
        try:
            yield from read_records(self.files[file_number])
        finally:
            self.cache.release(file_number)

    def count_packs_up_to(self, limit: int) -> int:
        """Count the records in all files by reading them, but stop counting at `limit`."""
        return sum(1 for _ in itertools.islice(itertools.chain.from_iterable(map(read_records, self.files)), limit))


@contextmanager
def open_records(path: Path | str, store: StoreSettings | None = None) -> Iterator[RecordSource]:
    """Open packed or unpacked records on a disk or in an object store.

    Args:
        path: A path as in `open_local_records`, or a URL.
        store: The settings of the object store.

    Raises:
        InputError: The records cannot be read, or there are none.
    """
    if not is_in_store(path):
        yield open_local_records(path)
        return
    settings = store or StoreSettings()
    with mirror_folder(Path(path), settings) as folder:
        download_missing_files(folder / METADATA_NAME)
        if (folder / METADATA_NAME).exists():
            metadata = RecordMetadata.read(folder)
            yield _make_packed_source(
                folder, metadata, ShardCache(folder, metadata.shard_table, settings.cache_bytes, settings.connections)
            )
            return
    with open_inputs(path, settings) as inputs:
        download_missing_files(*inputs.sizes)
        yield open_local_records(inputs.folder)


def open_local_records(path: Path | str) -> RecordSource:
    """Open packed or unpacked records in the local file system.

    Args:
        path: A folder of packed records, or unpacked records: a folder, a file or a glob pattern.

    Raises:
        InputError: The records cannot be read, or there are none.
    """
    path = Path(path)
    if path.is_dir() and detect_pack_format(path) is not None:
        metadata = RecordMetadata.read(path)
        check_shards_exist(path, metadata.shard_table)
        return _make_packed_source(path, metadata)
    return _open_unpacked_records(path)


def _make_packed_source(path: Path, metadata: RecordMetadata, cache: ShardCache | None = None) -> RecordSource:
    """Return the `RecordSource` for a folder of packed records.

    If the records are in an object store, `path` is the local copy of the folder, and `cache` fetches its shards.
    """
    return RecordSource(
        path=path,
        schema=PackedSchema.from_sizes(metadata),
        files=ShardPaths(path, metadata.shard_table),
        packing_factor=metadata.packing_factor,
        vocabulary_size=metadata.vocabulary.size if metadata.vocabulary is not None else None,
        identity=metadata.compute_packs_sha256(),
        metadata=metadata,
        cache=cache,
    )


def _open_unpacked_records(path: Path) -> RecordSource:
    """Open unpacked records, and check the features of the first record.

    Raises:
        InputError: There are no records, or the first record is not an unpacked example.
    """
    sizes = list_record_files(path)
    files = tuple(sizes)
    first = next(read_records(files[0]), None)
    if first is None:
        raise InputError(f"{files[0]}: the file contains no records; remove it, or pass another folder")
    try:
        features = decode_example(first)
        if "next_sentence_positions" in features:
            raise RecordError(
                f"the record is a pack, but {METADATA_NAME} is missing in its folder; run `gaudi-bert pack` again"
            )
        schema = infer_unpacked_schema(features)
        check_features(features, schema)
    except RecordError as error:
        raise InputError(f"{files[0]}: record 0: {error}") from error
    vocabulary = find_vocabulary(path)
    return RecordSource(
        path=path,
        schema=schema,
        files=files,
        packing_factor=1.0,
        vocabulary_size=sum(1 for _ in open_file(vocabulary)) if vocabulary is not None else None,
        identity=hashlib.sha256(json.dumps([[file.name, size] for file, size in sizes.items()]).encode("utf-8")).hexdigest(),
    )


def check_records_fit_model(source: RecordSource, config: BertConfig) -> None:
    """Check that the model has enough positions and a large enough vocabulary for the records.

    Raises:
        InputError: The model is too small for the data.
    """
    if source.schema.max_sequence_length > config.max_position_embeddings:
        raise InputError(
            f"{source.path}: the rows have {source.schema.max_sequence_length} tokens, but the model has only "
            f"model.max_position_embeddings = {config.max_position_embeddings} positions; set a larger number"
        )
    if source.vocabulary_size is not None and source.vocabulary_size > config.vocab_size:
        raise InputError(
            f"{source.path}: the vocabulary of the data has {source.vocabulary_size:,} tokens, but the model has only "
            f"model.vocab_size = {config.vocab_size:,}; set a larger number, or pass data with the vocabulary of the model"
        )
