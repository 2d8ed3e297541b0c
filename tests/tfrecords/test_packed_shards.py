"""Packed records against protobuf's own deterministic serialisation of what the naive twin packs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.base import InputFile
from gaudi_bert.common.sampling import SampledPacks
from gaudi_bert.tfrecords.packed_shards import PackEncoder, _EncodeStatus, max_packed_record_size
from gaudi_bert.tfrecords.scan import IndexedSequences
from gaudi_bert.tfrecords.wire.schema import PackedSchema, UnpackedSchema
from gaudi_bert.tfrecords.write import _read_group_into_memory
from tests.builders.shards import index_entries
from tests.oracles.packed_record import pack_sequences
from tests.oracles.wire import FLOAT_KEYS, crc32c, example, frame, random_sequence, unframe

protobuf_example = pytest.importorskip("tests.oracles.protobuf_example", exc_type=ImportError)


def index_of(path: Path, sequences: list[dict], schema: UnpackedSchema) -> IndexedSequences:
    """Write the sequences to `path` and scan them."""
    rng = random.Random(len(sequences))
    data = b""
    for sequence in sequences:
        order = list(sequence)
        rng.shuffle(order)
        data += frame(example(sequence, order))
    path.write_bytes(data)
    file = InputFile(name="part", bytes=len(data), crc32c=crc32c(data), sequences=len(sequences))
    return _read_group_into_memory([path], [file], schema, lambda size: np.zeros(size, np.uint8), 1, lambda _count: None)


def singles(count: int) -> SampledPacks:
    """Each sequence alone in its pack."""
    return SampledPacks(np.arange(count, dtype=np.int32), np.arange(count + 1))


def of_length(rng: random.Random, length: int, max_sequence_length: int, max_predictions: int, ids: int = 30522) -> dict:
    """A random sequence of exactly this length."""
    sequence = random_sequence(rng, length, min(max_predictions, length), ids)
    real = sum(sequence["input_mask"])
    sequence["input_ids"][real:] = [rng.randint(1, ids - 1) for _ in range(length - real)]
    sequence["input_mask"] = [1] * length
    padding = {"masked": max_predictions, "input_": max_sequence_length, "segmen": max_sequence_length}
    for name, size in ((name, padding.get(name[:6], 1)) for name in sequence):
        sequence[name] += [0.0 if name in FLOAT_KEYS else 0] * (size - len(sequence[name]))
    return sequence


def _fill_packs(rng: random.Random, max_sequence_length: int, depth: int, packs: int) -> list[list[int]]:
    """Random lengths for each pack: some packs full, some with padding, 1 to depth sequences."""
    chosen = []
    for _ in range(packs):
        count = rng.choice([1, depth, rng.randint(1, depth)])
        count = min(count, max_sequence_length)
        cuts = sorted(rng.sample(range(1, max_sequence_length), count - 1)) if count > 1 else []
        lengths = [end - start for start, end in zip([0, *cuts], [*cuts, max_sequence_length], strict=True)]
        if rng.random() < 0.5:
            lengths[-1] = rng.randint(1, lengths[-1])
        chosen.append(lengths)
    return chosen


@pytest.mark.parametrize(
    ("max_sequence_length", "max_predictions", "depth", "vocabulary"),
    [
        *((16, 3, 1, 128), (16, 16, 4, 129), (17, 3, 16, 30522), (131, 20, 64, 2**21), (300, 7, 200, 30522)),
        *((509, 75, 7, 2**21), (8192, 1229, 64, 30522)),
    ],
)
def test_packs_are_byte_equal_to_protobufs(
    tmp_path: Path, max_sequence_length: int, max_predictions: int, depth: int, vocabulary: int
) -> None:
    rng = random.Random(max_sequence_length * 1000 + depth)
    lengths = _fill_packs(rng, max_sequence_length, depth, 24 if max_sequence_length < 200 else 5)
    sizes = (max_sequence_length, max_predictions)
    packs = [[of_length(rng, length, *sizes, vocabulary) for length in pack] for pack in lengths]
    masked_slots = max(int(sum(sum(member["masked_lm_weights"]) for member in pack)) for pack in packs) or 1
    sequences = [member for pack in packs for member in pack]
    numbers = list(range(len(sequences)))
    rng.shuffle(numbers)  # so that members lie anywhere in the buffer
    group = index_of(tmp_path / "part", [sequences[number] for number in numbers], UnpackedSchema(*sizes))
    rows = np.argsort(numbers).astype(np.int32)
    starts = np.cumsum([0, *(len(pack) for pack in packs)])
    schema = PackedSchema(max_sequence_length, masked_slots, depth, max_predictions)
    encoder = PackEncoder(schema, group, SampledPacks(rows, starts))
    out = np.full(len(packs) * max_packed_record_size(schema), 0xEE, np.uint8)
    entries = np.zeros((len(packs), 2), np.uint32)
    status, following, size = encoder.encode_packs(0, len(packs), out, entries)
    assert (status, following) == (_EncodeStatus.DONE, len(packs))
    payloads, damaged = unframe(out[:size].tobytes())
    assert damaged is None
    assert entries.tolist() == index_entries(payloads).tolist()
    for pack, payload in zip(packs, payloads, strict=True):
        assert len(payload) + 16 <= max_packed_record_size(schema)
        assert payload == protobuf_example.serialize(pack_sequences(pack, max_sequence_length, masked_slots, depth))


def test_a_full_output_is_continued_where_it_stopped(tmp_path: Path) -> None:
    rng = random.Random(5)
    sequences = [random_sequence(rng, 64, 9) for _ in range(41)]
    group = index_of(tmp_path / "part", sequences, UnpackedSchema(64, 9))
    schema = PackedSchema(64, 9, 1, 9)
    encoder = PackEncoder(schema, group, singles(41))
    whole = np.zeros(41 * max_packed_record_size(schema), np.uint8)
    right, entries = np.zeros((41, 2), np.uint32), np.zeros((41, 2), np.uint32)
    whole_size = encoder.encode_packs(0, 41, whole, right)[2]
    for room in range(2 * max_packed_record_size(schema), 2 * max_packed_record_size(schema) + 1000, 97):
        memory, pieces, pack = np.full(room + 4096, 0xEE, np.uint8), [], 0
        while pack < 41:
            status, following, size = encoder.encode_packs(pack, 41, memory[:room], entries[pack:])
            assert status == (_EncodeStatus.OUTPUT_FULL if following < 41 else _EncodeStatus.DONE)
            assert following > pack
            assert (memory[room:] == 0xEE).all(), "nothing is written behind the output"
            pieces.append(memory[:size].tobytes())
            pack = following
        assert b"".join(pieces) == whole[:whole_size].tobytes()
        assert entries.tolist() == right.tolist()


@pytest.mark.parametrize(("max_sequence_length", "max_predictions", "depth"), [(256, 256, 1), (256, 2, 128), (2048, 8, 1)])
def test_shards_are_no_larger_than_asked_for_and_no_more_than_needed(
    tmp_path: Path, max_sequence_length: int, max_predictions: int, depth: int
) -> None:
    rng = random.Random(depth)
    sizes = (max_sequence_length, max_predictions)
    packs, length = 6, max_sequence_length // depth
    sequences = [of_length(rng, length, *sizes) for _ in range(packs * depth)]
    for sequence in sequences:
        masked = min(length, max_predictions // depth)
        free = [0] * (max_predictions - masked)
        sequence["masked_lm_positions"] = [*range(masked), *free]
        sequence["masked_lm_ids"] = [rng.randint(1, 30521) for _ in range(masked)] + free
        sequence["masked_lm_weights"] = [1.0] * masked + [0.0] * len(free)
    group = index_of(tmp_path / "part", sequences, UnpackedSchema(*sizes))
    schema = PackedSchema(max_sequence_length, max_predictions, depth, max_predictions)
    encoder = PackEncoder(
        schema, group, SampledPacks(np.arange(packs * depth, dtype=np.int32), np.arange(packs + 1) * depth)
    )
    out, entries = np.zeros(packs * max_packed_record_size(schema), np.uint8), np.zeros((packs, 2), np.uint32)
    _, _, size = encoder.encode_packs(0, packs, out, entries)
    assert encoder.count_shards(1, shard_bytes=size - 1) > 1
    assert encoder.count_shards(1, shard_bytes=size * 5 // 3) == 1
