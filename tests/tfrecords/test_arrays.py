"""Dense arrays from serialised examples."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.arrays import decode_columns
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema
from tests.builders.guarded_memory import GuardedBuffer
from tests.oracles.wire import FLOAT_KEYS, UNPACKED_KEYS, example, map_entry, random_sequence, unpacked_list

LENGTH, PREDICTIONS = 13, 5


def decode(payloads: list[bytes], gap: int = 0, memory: np.ndarray | None = None) -> dict[str, np.ndarray]:
    buffer = np.frombuffer(bytes(gap).join([b"", *payloads]), np.uint8)
    if memory is not None:
        memory[:] = buffer
        buffer = memory
    lengths = np.array([len(payload) for payload in payloads])
    offsets = np.cumsum(lengths + gap) - lengths
    return decode_columns(buffer, offsets, lengths, UnpackedSchema(LENGTH, PREDICTIONS).features, "here")


@pytest.mark.parametrize("gap", [0, 5])
def test_columns_are_the_features(gap: int) -> None:
    rng = random.Random(1)
    sequences = [random_sequence(rng, LENGTH, PREDICTIONS, 2_000_000) for _ in range(37)]
    order = list(UNPACKED_KEYS)
    payloads = []
    for features in sequences:
        rng.shuffle(order)
        payloads.append(example(features, order, extra=map_entry("further", [1, 2])))
    columns = decode(payloads, gap)
    for key in UNPACKED_KEYS:
        assert columns[key].dtype == (np.float32 if key in FLOAT_KEYS else np.int32)
        assert columns[key].tolist() == [features[key] for features in sequences]


@pytest.mark.parametrize("damage", ["cut", "missing", "twice", "size", "unpacked", "large", "kind", "tail"])
def test_what_does_not_fit_is_refused_by_its_number(damage: str) -> None:
    features = random_sequence(random.Random(2), LENGTH, PREDICTIONS)
    good = example(features)
    bad = {
        "cut": good[:-1],
        "missing": example({key: values for key, values in features.items() if key != "segment_ids"}),
        "twice": example(features, extra=map_entry("input_ids", features["input_ids"])),
        "size": example({**features, "input_ids": features["input_ids"][1:]}),
        "unpacked": example(features, encode=unpacked_list),
        "large": example({**features, "input_ids": [2**31] * LENGTH}),
        "kind": example(features).replace(b"input_mask", b"masked_ids"),
        "tail": good + b"\x0a\x00",
    }[damage]
    with pytest.raises(InputError, match="here: record 2: is not an example"):
        decode([good, good, bad, good])


def test_no_damage_makes_the_kernel_read_outside() -> None:
    """Every byte of a record overwritten in turn, the record right before, then right after a page that may not be read."""
    payload = example(random_sequence(random.Random(3), LENGTH, PREDICTIONS))
    guarded, kinds = GuardedBuffer(), set()
    for place in range(len(payload)):
        for value in (0x00, 0x7F, 0x80, 0xFF):
            broken = payload[:place] + bytes([value]) + payload[place + 1 :]
            outcomes = {outcome(broken, guarded.of(len(broken), at_the_end)) for at_the_end in (True, False)}
            assert len(outcomes) == 1
            kinds |= outcomes
    assert kinds == {"refused", "read"}


def outcome(payload: bytes, memory: np.ndarray) -> str:
    try:
        decode([payload], memory=memory)
    except InputError:
        return "refused"
    return "read"
