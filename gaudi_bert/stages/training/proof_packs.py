"""The packs that verify-model runs on: the first ones of the data, or random ones."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from gaudi_bert.common.arrays import Float32Array, Int32Array, IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.permutation import random_words

if TYPE_CHECKING:
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.model.sequences import Sequence
    from gaudi_bert.training.input.source import DataSource

__all__ = ["first_packs", "random_packs"]

RANDOM_LENGTH, RANDOM_PACKS = 128, 5
MOST_JOINED = 8
# Packs looked at for some that hold several sequences.
SEARCHED = 256

Batch = dict[str, Int32Array | Float32Array]
# What to call a record in an error, and its features.
PlacedRecord = tuple[str, dict[str, IntArray | Float32Array]]

_KINDS = {"int64": "int32", "float32": "float32"}


def first_packs(source: DataSource, config: BertConfig, packs: int) -> Batch:
    """The first packs of several sequences in the data, checked; unpacked sequences are joined to packs first.

    Where there are too few of them among the first `SEARCHED`, packs of one sequence make up the number.

    Args:
        source: packed or unpacked records.
        config: of the model that they are for.
        packs: how many (of unpacked sequences, three times as many).

    Returns:
        The packed features, integers int32.

    Raises:
        InputError: there are none, or one is damaged or does not belong to the model.
    """
    import tensorflow as tf

    from gaudi_bert.model.inputs import PACKED_FEATURES, as_packed
    from gaudi_bert.model.sequences import split_packs
    from gaudi_bert.training.input.value_limits import ValueLimits, check_values

    if source.is_packed:
        found = sorted(_first_records(source, SEARCHED), key=_holds_one)[:packs]
    else:
        found = _first_records(source, 3 * packs)
    places, rows = [place for place, _ in found], [row for _, row in found]
    tensors = as_packed(
        {
            spec.name: tf.constant(np.stack([row[spec.name] for row in rows]), _KINDS[spec.kind])
            for spec in source.schema.features
        }
    )
    batch = {name: tensors[name].numpy() for name in PACKED_FEATURES}
    check_values(batch, ValueLimits.of(source, config), places)
    if source.is_packed:
        return batch
    return _join([placed.sequence for placed in split_packs(batch)], source.schema.max_sequence_length)


def _holds_one(record: PlacedRecord) -> bool:
    return np.count_nonzero(record[1]["next_sentence_weights"]) < 2


def _first_records(source: DataSource, count: int) -> list[PlacedRecord]:
    """What to call the first `count` records, and what they hold."""
    from gaudi_bert.records.schema import RecordError, check_features
    from gaudi_bert.records.wire.example import decode_example
    from gaudi_bert.records.wire.framing import read_records

    stream = ((file.path, n, record) for file in source.files for n, record in enumerate(read_records(source.local(file))))
    found: list[PlacedRecord] = []
    for path, number, record in itertools.islice(stream, count):
        place = f"{path}: record {number}"
        try:
            features = decode_example(record)
            check_features(features, source.schema)
        except RecordError as error:
            raise InputError(f"{place}: {error}; write the records again") from error
        found.append((place, features))
    if not found:
        raise InputError(f"{source.path}: holds no records; give a folder that holds some")
    return found


def random_packs(config: BertConfig, seed: int) -> Batch:
    """Packs of random sequences of many lengths, some with padding."""
    from gaudi_bert.model.sequences import Sequence

    length = min(RANDOM_LENGTH, config.max_position_embeddings)
    words = iter(random_words(100_000, seed, "verify-model").tolist())

    def below(limit: int) -> int:
        return next(words) % limit

    sequences: list[Sequence] = []
    while sum(sequence.length for sequence in sequences) < RANDOM_PACKS * length:
        size = 1 + below(max(1, length // 2))
        positions = sorted({below(size) for _ in range(1 + size // 7)})
        sequences.append(
            Sequence(
                input_ids=np.array([below(config.vocab_size) for _ in range(size)], np.int32),
                segment_ids=np.array([place * config.type_vocab_size // size for place in range(size)], np.int32),
                masked_positions=np.array(positions, np.int32),
                masked_ids=np.array([below(config.vocab_size) for _ in positions], np.int32),
                next_sentence_label=int(len(sequences) % 3 < 2),
            )
        )
    return _join(sequences, length)


def _join(sequences: list[Sequence], length: int) -> Batch:
    """Packs by first fit, longest sequence first."""
    from gaudi_bert.model.sequences import join_sequences

    packs: list[list[Sequence]] = []
    for sequence in sorted(sequences, key=lambda each: -each.length):
        for pack in packs:
            if len(pack) < MOST_JOINED and sum(each.length for each in pack) + sequence.length <= length:
                pack.append(sequence)
                break
        else:
            packs.append([sequence])
    slots = max(sum(len(sequence.masked_ids) for sequence in pack) for pack in packs)
    return join_sequences(packs, length, slots, max(len(pack) for pack in packs))
