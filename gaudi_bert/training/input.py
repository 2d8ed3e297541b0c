"""Training and evaluation data: opening records, and reading them as batches in a seeded order that can be resumed.

A source is a folder of packed records, whose metadata states its sizes, or unpacked records, whose first record determines
the sizes. An unpacked sequence is passed to the model as a pack of one sequence, so that the same graph computes both kinds.
Data that does not fit the model is rejected before a model is built. If the data is in an object store, packed shards are
fetched shortly before they are read, and all other files are fetched when the data is opened.

`reading/global_order.py` defines the order of the packs in an epoch. Pack numbers continue from one epoch to the next: with
N packs in an epoch, pack number g is pack g mod N of epoch g div N. Process r of W reads the packs whose number mod W is r.
The position of a run is therefore a single number of packs, from which any number of processes can continue. If rows have
several lengths, the packs of each length are counted separately (`training/run_plan.py`).

A thread decodes a few batches ahead. `_check_values` checks all values on the host, and its errors name the file and the
record.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from gaudi_bert.artefacts.base import METADATA_NAME
from gaudi_bert.artefacts.mirrored_folder import fetch_files, mirror_folder
from gaudi_bert.artefacts.pack_kinds import find_pack_kind
from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.common.arrays import AnyArray, BatchArrays, Float32Array, Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import UnpackedFeature
from gaudi_bert.common.files import is_in_store, open_file
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.reading.global_order import MAX_STREAMS, choose_stream_count, pack_numbers_of_rank
from gaudi_bert.reading.streams import StoredPacks
from gaudi_bert.tfrecords.files import find_vocabulary, list_record_files, open_inputs
from gaudi_bert.tfrecords.random_access import (
    RecordFiles,
    ShardCache,
    ShardPaths,
    check_shards_exist,
    open_packs,
)
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import PackedSchema, RecordError, UnpackedSchema, check_features, infer_unpacked_schema
from gaudi_bert.training.run_plan import MicroBatch

Batch = dict[str, Int32Array | Float32Array]

_BATCHES_AHEAD = 4


@dataclass(frozen=True)
class DataSource:
    """Records that have been opened, and their sizes.

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
        """Whether each record is a pack. Otherwise each record is a single sequence."""
        return isinstance(self.schema, PackedSchema)

    @property
    def depth(self) -> int:
        """The maximum number of sequences in a record. It is 1 for unpacked records."""
        return self.schema.depth if isinstance(self.schema, PackedSchema) else 1

    @property
    def packs(self) -> int | None:
        """The number of records in all files, or None if it is unknown."""
        return self.metadata.packs if self.metadata is not None else None

    @property
    def mean_tokens(self) -> float | None:
        """The mean number of tokens in a sequence, or None if it is unknown."""
        return self.metadata.tokens / self.metadata.sequences if self.metadata is not None else None

    @property
    def streams(self) -> int:
        """The number of shards that are read at the same time."""
        return choose_stream_count(self.metadata.shard_multiple if self.metadata is not None else 1)

    def reading_cost(self, processes: int) -> str | None:
        """Return a note for the user if processes have to share the streams, which multiplies the bytes that are read.

        Returns:
            The note, or None if every process has streams of its own.
        """
        readers = processes // math.gcd(self.streams, processes)
        if readers == 1 or self.metadata is None:
            return None
        multiple = -(-self.streams // processes) * processes
        multiple, gain = (multiple, "once") if multiple <= MAX_STREAMS else (MAX_STREAMS, "less often")
        return (
            f"note: each shard is read by {readers} of the {processes} processes, so that about {readers} times the bytes "
            f"of the packs are read (of a bucket, fetched); `pack --set packing.shard_multiple={multiple}` makes it {gain}"
        )

    def open_packs(self) -> StoredPacks:
        """Open the records for random access."""
        if self.metadata is None:
            return StoredPacks(RecordFiles(self.files, self.schema), self.streams)
        return open_packs(self.path, self.metadata, self.cache)

    def records_of(self, number: int) -> Iterator[bytes]:
        """Yield the encoded records of file `number`. A shard in an object store is fetched first, and released after it."""
        if self.cache is None:
            yield from read_records(self.files[number])
            return
        self.cache.download(number)
        try:
            yield from read_records(self.files[number])
        finally:
            self.cache.release(number)

    def count_packs(self, limit: int) -> int:
        """Count the records in all files by reading them. Counting stops at `limit`, which is then returned."""
        records = (record for file in self.files for record in read_records(file))
        return sum(1 for _ in itertools.islice(records, limit))


@contextmanager
def open_data(path: Path | str, store: StoreSettings | None = None) -> Iterator[DataSource]:
    """Open packed or unpacked records on a disk or in an object store, for the duration of the context.

    Args:
        path: A path as in `open_source`, or a URL.
        store: The settings of the object store.

    Raises:
        InputError: The records cannot be read, or there are none.
    """
    if not is_in_store(path):
        yield open_source(path)
        return
    settings = store or StoreSettings()
    with mirror_folder(Path(path), settings) as folder:
        fetch_files(folder / METADATA_NAME)
        if (folder / METADATA_NAME).exists():
            metadata = RecordMetadata.read(folder)
            cache = ShardCache(folder, metadata.shard_table, settings.cache_bytes, settings.connections)
            yield _packed_source(folder, metadata, cache)
            return
    with open_inputs(path, settings) as inputs:
        fetch_files(*inputs.sizes)
        yield open_source(inputs.folder)


def open_source(path: Path | str) -> DataSource:
    """Open local records.

    Args:
        path: A folder of packed records, or unpacked records: a folder, a file or a glob pattern.

    Raises:
        InputError: The records cannot be read, or there are none.
    """
    path = Path(path)
    if path.is_dir() and find_pack_kind(path) is not None:
        metadata = RecordMetadata.read(path)
        check_shards_exist(path, metadata.shard_table)
        return _packed_source(path, metadata)
    return _unpacked_source(path)


def _packed_source(path: Path, metadata: RecordMetadata, cache: ShardCache | None = None) -> DataSource:
    """Return the source of a packed folder. If the folder mirrors an object store, `cache` fetches its shards."""
    return DataSource(
        path=path,
        schema=PackedSchema.of(metadata),
        files=ShardPaths(path, metadata.shard_table),
        packing_factor=metadata.packing_factor,
        vocabulary_size=metadata.vocabulary.size if metadata.vocabulary is not None else None,
        identity=metadata.compute_packs_sha256(),
        metadata=metadata,
        cache=cache,
    )


def _unpacked_source(path: Path) -> DataSource:
    """Return the source of unpacked records, after checking the features of the first record.

    Raises:
        InputError: There are no records, or the first record is not an unpacked example.
    """
    sizes = list_record_files(path)
    files = tuple(sizes)
    first = next(read_records(files[0]), None)
    if first is None:
        raise InputError(f"{files[0]}: holds no records; remove it, or give the right folder")
    try:
        features = decode_example(first)
        if "next_sentence_positions" in features:
            raise RecordError(f"holds packs, but {METADATA_NAME} is missing next to it; finish writing the packed data")
        schema = infer_unpacked_schema(features)
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
    """Check that a model has enough positions and a large enough vocabulary for the data.

    Raises:
        InputError: The model is too small for the data.
    """
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


# --- Batches


@dataclass(frozen=True)
class TrainingOrder:
    """The order in which a run reads its packs, and the part that this process reads.

    Attributes:
        seed: Determines the order of the packs, together with the epoch.
        shuffle_packs: The size of the shuffle window, in packs.
        rank: The number of this process, from 0.
        size: The number of processes.
        packs_done: The number of packs that all processes together have already read.
        updates_done: The number of updates in which they were read.
    """

    seed: int
    shuffle_packs: int
    rank: int = 0
    size: int = 1
    packs_done: int = 0
    updates_done: int = 0


_Features = Callable[[int, IntArray, IntArray, int], Batch]
"""A function that reads packs: (index of the row length, shards, numbers within the shards, epoch) -> batch."""


def training_batches(source: DataSource, config: BertConfig, batch_packs: int, order: TrainingOrder) -> Iterator[Batch]:
    """Yield this process's training batches of pretraining records, without end.

    Args:
        source: The records. Unpacked records are returned as packs of one sequence.
        config: The model for which the values are checked.
        batch_packs: The number of packs in a batch.
        order: The order of the packs, and the position at which to begin.

    Yields:
        The packed features by name, int32 or float32 [batch_packs, ...].

    Raises:
        InputError: There are no records, or a value is out of range.
    """
    packs, limits = source.open_packs(), _value_limits(source, config)

    def features(which: int, shards: IntArray, records: IntArray, epoch: int) -> Batch:
        return _checked(source, packs.files, limits, shards, records)

    together = batch_packs * order.size
    even = (MicroBatch(0, first, first + together, batch_packs) for first in itertools.count(order.packs_done, together))
    return batches_in_order([packs], features, even, order, source.path)


def batches_in_order(
    lengths: Sequence[StoredPacks],
    features: _Features,
    micro_batches: Iterable[MicroBatch],
    order: TrainingOrder,
    path: Path,
) -> Iterator[Batch]:
    """Yield the batches that this process reads for a sequence of micro-batches.

    Args:
        lengths: The packs of each row length.
        features: Reads packs as a batch.
        micro_batches: The micro-batches, each with rows of one length.
        order: The seed, and which process this is. Each row length has its own global order of packs.
        path: The data, for error messages.

    Yields:
        Batches, each padded with empty packs to the size of its micro-batch.

    Raises:
        InputError: A row length has no packs.
    """
    orders = [packs.make_order(order.seed, order.shuffle_packs) for packs in lengths]
    readers = [packs.open_reader(each, order.rank, order.size) for packs, each in zip(lengths, orders, strict=True)]
    if not all(each.packs for each in orders):
        raise InputError(f"{path}: no records in it; give data that has some")

    def close() -> None:
        for reader in readers:
            reader.close()

    def batches() -> Iterator[Batch]:
        for which, begin, end, batch_packs in micro_batches:
            # Without a pack, the batch would have no shapes, so read at least one, even if it belongs to the next
            # micro-batch. `_filled` then replaces it with an empty pack.
            of_rank = pack_numbers_of_rank(begin, max(end, begin + order.size), order.rank, order.size)
            epochs, numbers = np.divmod(of_rank, orders[which].packs)
            parts = [
                features(which, *readers[which].locate_and_open(epoch, numbers[epochs == epoch]), epoch)
                for epoch in np.unique(epochs).tolist()
            ]
            batch = (
                parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            )
            yield _filled(batch, int(np.count_nonzero(of_rank < end)), batch_packs)

    return _ahead(batches(), close)


def _filled(batch: Batch, packs: int, batch_packs: int) -> Batch:
    """Return the first `packs` packs of a batch, followed by empty packs up to `batch_packs`."""
    missing = batch_packs - packs
    if not missing:
        return batch
    return cast(Batch, {name: np.pad(values[:packs], [(0, missing), (0, 0)]) for name, values in batch.items()})


def evaluation_batches(
    source: DataSource, config: BertConfig, batch_packs: int, rank: int = 0, size: int = 1, take_packs: int | None = None
) -> Iterator[Batch]:
    """Yield the batches of process `rank` of `size` that contain every record once, checked for a model.

    With `take_packs`, only the first `take_packs` records are read. The batches are those of `each_pack_once`.
    """
    packs = source.open_packs()
    read = partial(_checked, source, packs.files, _value_limits(source, config))
    return each_pack_once(packs, read, batch_packs, rank, size, take_packs)


def each_pack_once(
    stored: StoredPacks,
    read: Callable[[IntArray, IntArray], Batch],
    batch_packs: int,
    rank: int,
    size: int,
    take_packs: int | None,
) -> Iterator[Batch]:
    """Yield this process's part of the batches that contain every pack once, in the order of the files.

    Args:
        stored: The packs.
        read: Reads packs as a batch, from their file numbers and their numbers within the files.
        batch_packs: The number of packs in a batch. The last batch is padded with empty packs.
        rank: The number of this process, which reads the batches whose number mod `size` is `rank`.
        size: The number of processes.
        take_packs: Read only this many packs from the beginning, or all packs if None.
    """
    files = stored.files
    ends = np.cumsum(files.sizes)
    packs = int(ends[-1]) if take_packs is None else min(int(ends[-1]), take_packs)

    def batches() -> Iterator[Batch]:
        for first in range(rank * batch_packs, packs, size * batch_packs):
            numbers = np.arange(first, min(first + batch_packs, packs))
            shards = np.searchsorted(ends, numbers, side="right")
            files.close_shards_except(shards.tolist())
            yield _filled(read(shards, numbers - (ends - files.sizes)[shards]), len(numbers), batch_packs)

    return _ahead(batches(), lambda: files.close_shards_except(()))


def _checked(source: DataSource, files: RecordFiles, limits: dict[str, int], shards: IntArray, records: IntArray) -> Batch:
    """Read records as a batch of packs, and check all values.

    Raises:
        InputError: A value is out of range.
    """
    batch: dict[str, AnyArray] = files.read_records(shards, records)
    if not source.is_packed:
        batch = _as_packed(batch)
    _check_values(batch, limits, lambda row: files.format_location(int(shards[row]), int(records[row])))
    return batch


def _as_packed(unpacked: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Turn a batch of unpacked examples into packs of depth 1. A row that contains only padding has no sequence."""
    mask_BL = unpacked["input_mask"]
    packs, length = mask_BL.shape
    return {
        **{feature.key: unpacked[feature.key] for feature in UnpackedFeature},
        "positions": np.arange(length, dtype=np.int32)[np.newaxis, :] * mask_BL,
        "next_sentence_positions": np.zeros((packs, 1), np.int32),
        "next_sentence_labels": unpacked["next_sentence_labels"].reshape(packs, 1),
        "next_sentence_weights": mask_BL[:, :1].astype(np.float32),
    }


def _ahead(batches: Iterator[Batch], close: Callable[[], None]) -> Iterator[Batch]:
    """Yield the batches while a thread decodes the next few. When the iteration ends or is abandoned, call `close`."""
    with ExitStack() as stack:
        stack.callback(close)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        waiting: deque[Future[Batch | None]] = deque(pool.submit(next, batches, None) for _ in range(_BATCHES_AHEAD))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, batches, None))
            yield batch


# --- The check of every batch as it is read, before the model sees it
#
# On some devices, the embedding of a token id beyond the vocabulary is silently zero, and a wrong position gathers another
# token. Without this check, a run would train on garbage and report no error.


def _value_limits(source: DataSource, config: BertConfig) -> dict[str, int]:
    """Return the largest allowed value of each feature, given the sizes of the data and the model. The smallest is 0."""
    last = source.schema.max_sequence_length - 1
    return {
        "input_ids": config.vocab_size - 1,
        "input_mask": source.depth,
        "segment_ids": config.type_vocab_size - 1,
        "positions": last,
        "masked_lm_positions": last,
        "masked_lm_ids": config.vocab_size - 1,
        "masked_lm_weights": source.depth,
        "next_sentence_positions": last,
        "next_sentence_labels": 1,
        "next_sentence_weights": 1,
    }


def _check_values(batch: BatchArrays, limits: dict[str, int], name_of: Callable[[int], str]) -> None:
    """Check the values of one packed batch.

    Args:
        batch: The packed features.
        limits: The largest allowed value of each feature.
        name_of: Returns the file and record of a row, for error messages.

    Raises:
        InputError: A value is out of range, or the input mask does not number the sequences 1, 2, ... from the first slot.
    """
    for name, largest in limits.items():
        values = batch[name]
        if values.min() < 0 or values.max() > largest or not np.isfinite(values).all():
            row, slot = np.argwhere(~((values >= 0) & (values <= largest)))[0]
            raise InputError(
                f"{name_of(row)}: {name}[{slot}] = {values[row, slot]:g}, allowed are 0 .. {largest}; "
                "the records do not belong to this model, or are damaged"
            )
    mask_BL = batch["input_mask"]
    before, after = mask_BL[:, :-1], mask_BL[:, 1:]
    allowed = (after == before) | (after == 0) | ((after == before + 1) & (before > 0))
    allowed[:, 0] &= mask_BL[:, 0] == 1
    if not allowed.all():
        row, slot = np.argwhere(~allowed)[0]
        raise InputError(
            f"{name_of(row)}: input_mask is {mask_BL[row, slot]} at {slot} and {mask_BL[row, slot + 1]} at {slot + 1}; "
            "it must be 1..1, then 2..2 and so on, then 0..0; write the records again"
        )
