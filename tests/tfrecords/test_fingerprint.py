"""Hashes of sequences: equal where the content is, different for every small change, the same packed and unpacked."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.tfrecords.fingerprint import sum_hashes
from gaudi_bert.tfrecords.scan import allocate_scan_buffer
from gaudi_bert.tfrecords.verify import _hash_sequences_in_chunks, _summarize_file
from gaudi_bert.tfrecords.wire.schema import PackedSchema, UnpackedSchema
from tests.builders.effort import tries
from tests.builders.shards import index_entries
from tests.oracles.packed_record import pack_sequences
from tests.oracles.wire import example, frame, random_sequence


def hashes_of(path: Path, sequences: list[dict], schema: UnpackedSchema) -> list[int]:
    path.write_bytes(b"".join(frame(example(sequence)) for sequence in sequences))
    return [
        int(value) for _, piece in _hash_sequences_in_chunks(path, schema, allocate_scan_buffer()) for value in piece.hashes
    ]


def small_changes(sequence: dict) -> list[dict]:
    """Every sequence that differs by one value, and many with two values or two words swapped (all still legal)."""
    length, masked = sum(sequence["input_mask"]), int(sum(sequence["masked_lm_weights"]))
    changes = []

    def change(**features: list) -> None:
        changes.append({**sequence, **features})

    def replaced(name: str, place: int, value: float) -> list:
        return [value if number == place else other for number, other in enumerate(sequence[name])]

    for place in range(length):
        change(input_ids=replaced("input_ids", place, sequence["input_ids"][place] ^ 1))
        change(input_ids=replaced("input_ids", place, sequence["input_ids"][place] ^ 16384))
        change(segment_ids=replaced("segment_ids", place, 1 - sequence["segment_ids"][place]))
    for slot in range(masked):
        change(masked_lm_ids=replaced("masked_lm_ids", slot, sequence["masked_lm_ids"][slot] ^ 1))
        for position in range(length):
            if position != sequence["masked_lm_positions"][slot]:
                change(masked_lm_positions=replaced("masked_lm_positions", slot, position))
    change(next_sentence_labels=[1 - sequence["next_sentence_labels"][0]])
    if masked:
        fewer = {"masked_lm_weights": 0.0, "masked_lm_ids": 0, "masked_lm_positions": 0}
        change(**{name: replaced(name, masked - 1, value) for name, value in fewer.items()})
    for distance in (1, 2, 3, 4, 8, 16):
        for place in range(length - distance):
            for name in ("input_ids", "segment_ids"):
                swapped = list(sequence[name])
                swapped[place], swapped[place + distance] = swapped[place + distance], swapped[place]
                change(**{name: swapped})
    for start in range(0, length - 16, 4):
        for name in ("input_ids", "segment_ids"):
            words = list(sequence[name])
            words[start : start + 8], words[start + 8 : start + 16] = words[start + 8 : start + 16], words[start : start + 8]
            change(**{name: words})
    return list({repr(changed): changed for changed in changes if changed != sequence}.values())


@pytest.mark.parametrize(("max_sequence_length", "max_predictions"), [(9, 1), (33, 8), (150, 5)])
@pytest.mark.repeated
def test_every_small_change_changes_the_hash(tmp_path: Path, max_sequence_length: int, max_predictions: int) -> None:
    rng = random.Random(max_sequence_length)
    schema = UnpackedSchema(max_sequence_length, max_predictions)
    for _ in range(tries(2, 20)):
        sequence = random_sequence(rng, max_sequence_length, max_predictions)
        variants = [sequence, *small_changes(sequence)]
        hashes = hashes_of(tmp_path / "part", variants, schema)
        assert len(set(hashes)) == len(variants)


def test_packed_and_unpacked_hash_alike(tmp_path: Path) -> None:
    rng = random.Random(8)
    sequences = [random_sequence(rng, 40, 9) for _ in range(60)]
    for sequence in sequences:
        for name in ("input_ids", "input_mask", "segment_ids"):
            sequence[name] += [0] * 261
    packs = [sequences[start : start + 7] for start in range(0, 60, 7)]
    hashes = hashes_of(tmp_path / "unpacked", sequences, UnpackedSchema(301, 9))
    payloads = [example(pack_sequences(pack, 301, 63, 7)) for pack in packs]
    (tmp_path / "packed").write_bytes(b"".join(frame(payload) for payload in payloads))
    schema = PackedSchema(301, 63, 7, 9)
    pieces = [piece for _, piece in _hash_sequences_in_chunks(tmp_path / "packed", schema, allocate_scan_buffer())]
    assert np.concatenate([piece.hashes for piece in pieces]).tolist() == hashes
    file = _summarize_file(tmp_path / "packed", False, schema, allocate_scan_buffer(), lambda _: None)
    assert file.record_index.tolist() == index_entries(payloads).tolist()
    lengths = np.bincount([sum(sequence["input_mask"]) for sequence in sequences], minlength=file.lengths.size)
    assert file.lengths.tolist() == lengths.tolist()


def test_sums_do_not_depend_on_order_and_see_doubles() -> None:
    hashes = np.random.default_rng(4).integers(-(2**63), 2**63, 10_000)
    assert sum_hashes(np.random.default_rng(5).permutation(hashes)) == sum_hashes(hashes)
    doubled = hashes.copy()
    doubled[1] = doubled[0]
    assert sum_hashes(doubled) != sum_hashes(hashes)
