"""Records to batches: a seeded, deterministic order that can be taken up again at any update.

Epoch e of process r reads the files of its share in the order of a permutation keyed by (seed, e, r), then mixes the packs
in a shuffle buffer whose seed comes from the same key. Epochs follow one another without a gap: a batch may hold the last
packs of one and the first of the next, so nothing is dropped. A run that resumes after n packs starts at the epoch that
holds pack n and skips, unparsed, what was read of it.

Each record carries its file and number, so that an error can name it. Values are checked on the host (`value_limits.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import Float32Array, Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.permutation import permutation, random_words
from gaudi_bert.model.inputs import as_packed
from gaudi_bert.records.read.on_the_fly import OnTheFlyPacking
from gaudi_bert.records.schema import PackedSchema, RecordError, check_features
from gaudi_bert.records.wire.example import decode_example
from gaudi_bert.records.wire.framing import read_records
from gaudi_bert.training.input.source import DataSource, SourceFile
from gaudi_bert.training.input.value_limits import ValueLimits, check_values

__all__ = ["Batch", "TrainingOrder", "evaluation_batches", "training_batches"]

Batch = dict[str, Int32Array | Float32Array]
Tensors = dict[str, tf.Tensor]

READ_BUFFER_BYTES = 2**20
PREFETCHED_BATCHES = 4


@dataclass(frozen=True)
class TrainingOrder:
    """Which packs this process reads, and in which order.

    Attributes:
        seed: of the order.
        shuffle_packs: size of the shuffle buffer.
        rank: number of this process.
        size: processes that train together.
        skip_packs: packs that this process has read already.
    """

    seed: int
    shuffle_packs: int
    rank: int = 0
    size: int = 1
    skip_packs: int = 0


def training_batches(source: DataSource, limits: ValueLimits, batch_packs: int, order: TrainingOrder) -> Iterator[Batch]:
    """Batches of packed features without end, each int32 or float32 [batch_packs, ...].

    Raises:
        InputError: the files cannot be shared by `order.size` processes, or hold no record, or a record is damaged or does
            not fit (while iterating).
    """
    if source.on_the_fly:
        yield from _packed_on_the_fly(source, limits, batch_packs, order)
        return
    files = source.share(order.rank, order.size)
    first_epoch, skip_in_epoch = 0, 0
    _check_not_empty(files, order)
    if order.skip_packs or source.packs is not None:
        epoch_packs = _count_packs(files)
        if epoch_packs == 0:
            raise InputError(f"{source.path}: process {order.rank} of {order.size} would get no packs; use fewer processes")
        first_epoch, skip_in_epoch = divmod(order.skip_packs, epoch_packs)

    def epoch(number: tf.Tensor) -> tf.data.Dataset:
        key = tf.numpy_function(lambda e: _epoch_key(len(files), order, int(e)), [number], tf.int64)
        key = tf.ensure_shape(key, [len(files) + 1])
        records = _records(files, key[1:])
        return records.shuffle(order.shuffle_packs, seed=key[0], reshuffle_each_iteration=False)

    stream = tf.data.Dataset.range(first_epoch, 2**62).flat_map(epoch).skip(skip_in_epoch)
    stream = _parsed(stream.batch(batch_packs, drop_remainder=True), source, files, batch_packs)
    for batch, _ in _checked(stream, source, files, limits):
        yield batch


def _check_not_empty(files: Sequence[SourceFile], order: TrainingOrder) -> None:
    """Refuse a share without records: epochs of nothing would follow one another for ever."""
    counted = all(file.packs is not None for file in files)
    if counted or any(next(read_records(file.path), None) is not None for file in files):
        return
    more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
    raise InputError(
        f"{files[0].path}{more}: no records in it, and process {order.rank} of {order.size} has nothing else to read; "
        "remove what is empty, or use fewer processes"
    )


def _packed_on_the_fly(source: DataSource, limits: ValueLimits, batch_packs: int, order: TrainingOrder) -> Iterator[Batch]:
    """Batches of unpacked records that are packed as they are read, with another pairing each epoch."""
    schema = cast(PackedSchema, source.schema)
    packing = OnTheFlyPacking(
        source.on_the_fly,
        schema,
        batch_packs=batch_packs,
        seed=order.seed,
        rank=order.rank,
        world_size=order.size,
    )
    names = [f"{source.path}: a pack on the fly"] * batch_packs
    for batch in packing.stream(order.skip_packs // batch_packs):
        check_values(batch, limits, names)
        yield batch


def evaluation_batches(
    source: DataSource, limits: ValueLimits, batch_packs: int, rank: int = 0, size: int = 1, take_packs: int | None = None
) -> Iterator[Batch]:
    """Every record once, in the order of the files; the last batch is filled up with empty packs.

    Args:
        source: the records.
        limits: what values are allowed.
        batch_packs: packs of each batch; shapes are the same for all batches.
        rank: number of this process: it gets the batches whose number mod `size` is `rank`.
        size: processes that evaluate together.
        take_packs: only the first so many records; None for all.

    Raises:
        InputError: a record is damaged or does not fit (while iterating).
    """
    records = _records(source.files, tf.range(len(source.files), dtype=tf.int64))
    if take_packs is not None:
        records = records.take(take_packs)
    stream = _parsed(records.batch(batch_packs).shard(size, rank), source, source.files, None)
    for batch, packs in _checked(stream, source, source.files, limits):
        if packs == batch_packs:
            yield batch
        else:
            missing = batch_packs - packs
            yield cast(Batch, {name: np.pad(values, [(0, missing), (0, 0)]) for name, values in batch.items()})


def _epoch_key(files: int, order: TrainingOrder, epoch: int) -> IntArray:
    """The seed of the shuffle buffer, then the order of the files: int64 [1 + files]."""
    seed = int(random_words(1, order.seed, "shuffle buffer", epoch, order.rank)[0] >> np.uint64(1))
    return np.concatenate([[seed], permutation(files, order.seed, "file order", epoch, order.rank)]).astype(np.int64)


def _records(files: Sequence[SourceFile], order: tf.Tensor) -> tf.data.Dataset:
    """(number of the file, number of the record in it, its bytes) of every record, file after file in `order`."""
    paths = tf.constant([str(file.path) for file in files])
    compressions = tf.constant([file.compression for file in files])

    def file_records(number: tf.Tensor) -> tf.data.Dataset:
        records = tf.data.TFRecordDataset(
            tf.gather(paths, number), tf.gather(compressions, number), buffer_size=READ_BUFFER_BYTES
        )
        return records.enumerate().map(lambda index, record: (number, index, record))

    return tf.data.Dataset.from_tensor_slices(order).flat_map(file_records)


def _parsed(
    batches: tf.data.Dataset, source: DataSource, files: Sequence[SourceFile], batch_packs: int | None
) -> tf.data.Dataset:
    """Batches of (numbers of files, numbers of records, features)."""
    features = {spec.name: tf.io.FixedLenFeature([spec.length], tf.as_dtype(spec.kind)) for spec in source.schema.features}
    paths = tf.constant([str(file.path) for file in files])

    def parse(numbers: tf.Tensor, indices: tf.Tensor, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, Tensors]:
        names = tf.strings.join([tf.gather(paths, numbers), ": record ", tf.strings.as_string(indices)])
        parsed = tf.io.parse_example(records, features, example_names=names)
        parsed = {name: tf.cast(value, tf.int32) if value.dtype == tf.int64 else value for name, value in parsed.items()}
        if batch_packs is not None:
            parsed = {name: tf.ensure_shape(value, [batch_packs, None]) for name, value in parsed.items()}
        return numbers, indices, parsed

    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = 1
    parsed_batches = batches.map(parse).prefetch(PREFETCHED_BATCHES)
    return parsed_batches.with_options(options)


def _checked(
    dataset: tf.data.Dataset, source: DataSource, files: Sequence[SourceFile], limits: ValueLimits
) -> Iterator[tuple[Batch, int]]:
    """Checked numpy batches, each with its number of packs; errors of TensorFlow become one line."""
    iterator = iter(dataset)
    while True:
        try:
            numbers, indices, features = next(iterator)
        except StopIteration:
            return
        except (tf.errors.OpError, UnicodeDecodeError) as error:  # the latter where TensorFlow quotes the bytes it refuses
            raise _explained(error, source, files) from error
        if not source.is_packed:
            with tf.device("/CPU:0"):
                features = as_packed(features)
        batch = {name: value.numpy() for name, value in features.items()}
        places = zip(numbers.numpy(), indices.numpy(), strict=True)
        records = [f"{files[number].path}: record {index}" for number, index in places]
        check_values(batch, limits, records)
        yield batch, len(records)


def _explained(error: Exception, source: DataSource, files: Sequence[SourceFile]) -> InputError:
    """What TensorFlow stumbled over, found by reading the file that it names (or all of them) with our own reader."""
    text = " ".join(str(error).split())
    named = re.search(r"Name: (.+?): record \d+", text)
    suspects = [file for file in files if named is None or str(file.path) == named[1]]
    for file in suspects:
        count = 0
        try:
            for payload in read_records(file.path):
                check_features(decode_example(payload), source.schema)
                count += 1
        except RecordError as problem:
            return InputError(f"{file.path}: record {count}: {problem}; write the records again")
        except InputError as problem:
            return problem
    return InputError(f"{source.path}: cannot be read: {text}")


def _count_packs(files: Sequence[SourceFile]) -> int:
    """Records of `files`, counted by reading them where nothing says it."""
    total = 0
    for file in files:
        if file.packs is not None:
            total += file.packs
            continue
        records = tf.data.TFRecordDataset(str(file.path), file.compression, buffer_size=READ_BUFFER_BYTES)
        total += sum(1 for _ in records)
    return total
