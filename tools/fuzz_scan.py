"""Scan damaged TFRecord files, and compare the result with protobuf's pure-Python parser and with the rules for valid
records.

    PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python python -m tools.fuzz_scan SEED COUNT FOLDER

This is a program of its own, so that a crash does not end the tests. Each damaged file (mutant) is scanned in a buffer of
exactly its size that is adjacent to an inaccessible memory page, alternately after and before the buffer. A kernel that
reads a byte outside of the buffer is therefore killed. The last printed line begins with `done`, followed by the counts.

There are two kinds of damage. Damage to a file flips bits, removes or adds bytes, exchanges records, or changes lengths
together with their checksums. Damage to a record is followed by a correction of the record's checksums, so that the damaged
bytes reach the parser.
"""

from __future__ import annotations

import random
import re
import resource
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.scan import FRONT_BYTES, RecordScan, UnpackedFormat, allocate_scan_buffer, read_record_schema
from gaudi_bert.tfrecords.wire.example import decode_example
from tests.builders.machines import GuardedBuffer
from tests.oracles import protobuf_example
from tests.oracles.wire import (
    FLOAT_KEYS,
    UNPACKED_KEYS,
    crc32c,
    example,
    field,
    frame,
    map_entry,
    masked_crc,
    packed_list,
    random_sequence,
    split_list,
    unframe,
    unpacked_list,
    varint,
)

MAX_SEQUENCE_LENGTH, MAX_PREDICTIONS = 13, 3


@dataclass(frozen=True)
class Mutant:
    """A damaged file, with its number, the kind of damage, and the original bytes."""

    number: int
    kind: str
    data: bytes
    original: bytes


def random_features(rng: random.Random) -> dict[str, list]:
    """Return the features of a random valid example."""
    return random_sequence(rng, MAX_SEQUENCE_LENGTH, MAX_PREDICTIONS)


def make_payloads(rng: random.Random) -> list[bytes]:
    """Return the records of a small valid file, with map entries in random order."""
    payloads = []
    for _ in range(rng.randint(1, 4)):
        order = list(UNPACKED_KEYS)
        rng.shuffle(order)
        payloads.append(example(random_features(rng), order))
    return payloads


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))] if data else data


def insert_bytes(rng: random.Random, data: bytes) -> bytes:
    place = rng.randint(0, len(data))
    return data[:place] + rng.choice([rng.randbytes(rng.randint(1, 40)), bytes(rng.randint(1, 40))]) + data[place:]


def delete_bytes(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(max(1, len(data)))
    return data[:start] + data[start + rng.randint(1, 40) :]


def overwrite_bytes(rng: random.Random, data: bytes) -> bytes:
    """Replace a range of bytes with zeros, ones or random bytes, like a lost disk block."""
    start = rng.randrange(max(1, len(data)))
    length = min(rng.randint(1, 64), len(data) - start)
    run = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])
    return data[:start] + run + data[start + length :]


Damage = Callable[[random.Random, bytes], bytes]
FILE_DAMAGE: dict[str, Damage] = {
    "bits flipped": flip_bits,
    "truncated": truncate,
    "bytes inserted": insert_bytes,
    "bytes deleted": delete_bytes,
    "bytes overwritten": overwrite_bytes,
}


def whole_records(rng: random.Random, payloads: list[bytes]) -> bytes:
    """Exchange, remove or duplicate records. The result is still a valid TFRecord file."""
    kept = list(payloads)
    action = rng.choice(["swap", "lose", "double"])
    if action == "swap":
        rng.shuffle(kept)
    elif action == "lose":
        del kept[rng.randrange(len(kept))]
    else:
        kept.insert(rng.randint(0, len(kept)), rng.choice(payloads))
    return b"".join(frame(payload) for payload in kept)


def lying_length(rng: random.Random, payloads: list[bytes]) -> bytes:
    """Change the length of one record by a small or huge amount, with a matching checksum of the length."""
    liar = rng.randrange(len(payloads))
    length = len(payloads[liar])
    huge = [2**31 - 1, 2**31, 2**32 - 17, 2**32, 2**40, 2**63 - 17, 2**63 - 1, 2**63, 2**64 - 16, 2**64 - 12, 2**64 - 1]
    near = [0, 1, length - 1, length + 1, length + 4, length + rng.randint(1, 2000), rng.randint(0, length)]
    claimed = rng.choice(huge if rng.random() < 0.5 else near)
    return b"".join(frame(payload, claimed if index == liar else None) for index, payload in enumerate(payloads))


def inner_lengths(rng: random.Random, payload: bytes) -> bytes:
    """Replace a varint inside the message with another one, which changes a nested length, a tag or a value."""
    place = rng.randrange(len(payload))
    value = rng.choice(
        [0, 1, 127, 128, 2**14, 2**31, 2**32 - 1, 2**35, 2**62, 2**63 - 1, 2**63, 2**64 - 1, rng.getrandbits(12)]
    )
    return payload[:place] + varint(value, rng.choice([0, 0, 1])) + payload[place + rng.randint(0, 3) :]


def single_values_unpacked(key: str, values: list) -> bytes:
    """Encode lists of a single value unpacked, which takes a byte less than packed. Some writers do so."""
    return (unpacked_list if len(values) == 1 else packed_list)(key, values)


def odd_but_legal(rng: random.Random, payload: bytes) -> bytes:
    """Return valid but unusual protobuf: other encodings, repeated or additional map entries, unknown fields."""
    features, other = random_features(rng), random_features(rng)
    repeated = rng.choice(UNPACKED_KEYS)
    encodings = [packed_list, unpacked_list, split_list]
    kinds: list[Callable[[], bytes]] = [
        lambda: example(features, encode=unpacked_list),
        lambda: example(features, encode=split_list),
        lambda: example(features, extra=map_entry(repeated, other[repeated])),
        lambda: example(features, extra=map_entry("extra", [1, 2, 3])),
        lambda: example(features) + field(2, b"unknown"),
        lambda: example(features) + field(1, map_entry(repeated, other[repeated])),
        lambda: example(features, encode=lambda key, values: rng.choice(encodings)(key, values)),
        lambda: example(features, encode=single_values_unpacked),
        lambda: example({key: values for key, values in features.items() if key != repeated}),
    ]
    return rng.choice(kinds)()


def off_contract(rng: random.Random, payload: bytes) -> bytes:
    """Return a well-formed example with invalid values: holes in masks, lists of other lengths, unusual numbers."""
    features = random_features(rng)
    key = rng.choice(UNPACKED_KEYS)
    values = features[key]
    action = rng.randrange(4)
    if action == 0:
        values.insert(rng.randint(0, len(values)), values[0])
    elif action == 1:
        values.pop(rng.randrange(len(values)))
    else:
        place = rng.randrange(len(values))
        is_float = isinstance(values[0], float)
        values[place] = rng.choice(
            [0.5, 2.0, float("nan"), -1.0] if is_float else [2, 255, -1, 2**31, 2**40, 2**63 - 1, -(2**63)]
        )
    return example(features)


def strange_entry(rng: random.Random, payload: bytes) -> bytes:
    """Add a map entry on which parsers may disagree: two keys, a damaged feature, a key that is not UTF-8, or a group."""
    features, other = random_features(rng), random_features(rng)
    known = rng.choice(UNPACKED_KEYS)
    value = field(2, field(2 if known in FLOAT_KEYS else 3, packed_list(known, other[known])))
    unknown = rng.choice([b"further", b"document_number", "été".encode(), b"key \xff of no text", b"\xc3"])
    action = rng.randrange(6)
    if action == 0:
        keys = [unknown if rng.random() < 0.5 else rng.choice(UNPACKED_KEYS).encode(), known.encode()]
        rng.shuffle(keys)
        entry = field(1, b"".join(field(1, key) for key in keys) + value)
    elif action == 1:
        entry = field(1, field(1, unknown) + value)
    elif action == 2:
        body = rng.choice([b"\x80", b"\xff" * 10 + b"\x01", b"\x01\x02\x83", b"\x00" * 6, b""])
        entry = field(1, field(1, unknown) + field(2, field(rng.choice([1, 2, 3, 4]), field(1, body))))
    elif action == 3:
        content = field(1, unknown) + value
        entry = field(1, content[: rng.randrange(len(content))])
    elif action == 4:
        entry = field(1, field(1, known.encode()) + rng.choice([group(rng), b""]) + value + group(rng))
    else:
        entry = group(rng)
    return example(features, extra=entry) + rng.choice([b"", b"", group(rng)])


def group(rng: random.Random) -> bytes:
    """Return a (possibly nested or incomplete) protobuf group."""
    number, depth = rng.choice([1, 2, 7, 30]), rng.choice([1, 1, 2, 5, 98, 120])
    start, end = varint(number << 3 | 3), varint(rng.choice([number, number, number + 1]) << 3 | 4)
    inside = rng.choice([b"", field(1, b"text"), varint(5 << 3) + varint(300), b"\x0d\x00\x00\x00\x00"])
    return start * depth + inside + end * (depth - rng.choice([0, 0, 0, 1]))


RECORD_DAMAGE: dict[str, Damage] = {
    **{f"record: {kind}": damage for kind, damage in FILE_DAMAGE.items()},
    "record: inner length": inner_lengths,
    "record: odd but legal": odd_but_legal,
    "record: off contract": off_contract,
    "record: strange entry": strange_entry,
}


def mutants(seed: int, count: int) -> Iterator[Mutant]:
    """Yield `count` damaged files, which are determined by `seed`. The kinds of damage alternate."""
    kinds = [*FILE_DAMAGE, "whole records", "lying length", "checksums made right", *RECORD_DAMAGE]
    for number in range(count):
        rng = random.Random(f"{seed}:{number}")
        kind = kinds[number % len(kinds)]
        payloads = make_payloads(rng)
        original = b"".join(frame(payload) for payload in payloads)
        if kind in FILE_DAMAGE:
            data = FILE_DAMAGE[kind](rng, original)
        elif kind == "whole records":
            data = whole_records(rng, payloads)
        elif kind == "lying length":
            data = lying_length(rng, payloads)
        elif kind == "checksums made right":
            data = mend_first_checksums(rng.choice(list(FILE_DAMAGE.values()))(rng, original))
        else:
            place = rng.randrange(len(payloads))
            payloads[place] = RECORD_DAMAGE[kind](rng, payloads[place])
            data = b"".join(frame(payload) for payload in payloads)
        yield Mutant(number, kind, data, original)


def mend_first_checksums(data: bytes) -> bytes:
    """Correct the checksums of every record that can still be located from the beginning of the file."""
    out, offset = bytearray(data), 0
    while len(out) - offset >= 16:
        out[offset + 8 : offset + 12] = masked_crc(bytes(out[offset : offset + 8]))
        (length,) = struct.unpack_from("<Q", out, offset)
        if offset + 16 + length > len(out):
            break
        payload = bytes(out[offset + 12 : offset + 12 + length])
        out[offset + 12 + length : offset + 16 + length] = masked_crc(payload)
        offset += 16 + length
    return bytes(out)


# --- the scan of a mutant, and its expected result


def contract(payload: bytes, sizes: tuple[int, int] | None) -> dict | None:
    """Return the features of a payload according to protobuf's parser, or None if they are not valid for an unpacked
    example.
    """
    parsed = protobuf_example.parse(payload)
    if parsed is None:
        return None
    features = {}
    for key in UNPACKED_KEYS:
        kind, values = parsed.get(key, ("", []))
        if kind != ("float_list" if key in FLOAT_KEYS else "int64_list"):
            return None
        features[key] = values
    length, predictions = len(features["input_ids"]), len(features["masked_lm_positions"])
    real, masked = features["input_mask"].count(1), features["masked_lm_weights"].count(1)
    legal = (
        (sizes is None or sizes == (length, predictions))
        and length > 0
        and predictions > 0
        and not {"positions", "next_sentence_positions"} <= set(parsed)
        and len(features["segment_ids"]) == len(features["input_mask"]) == length
        and len(features["masked_lm_ids"]) == len(features["masked_lm_weights"]) == predictions
        and features["input_mask"] == [1] * real + [0] * (length - real)
        and features["masked_lm_weights"] == [1] * masked + [0] * (predictions - masked)
        and real > 0
        and part(features["input_ids"], real, 2**21)
        and part(features["segment_ids"], real, 128)
        and part(features["masked_lm_ids"], masked, 2**21)
        and part(features["masked_lm_positions"], masked, real)
        and features["next_sentence_labels"] in ([0], [1])
    )
    return features if legal else None


def part(values: list[int], used: int, bound: int) -> bool:
    """Return whether the first `used` values are from 0 to `bound` - 1, and all other values are 0."""
    return all(0 <= value < bound for value in values[:used]) and not any(values[used:])


def expectation(data: bytes) -> tuple[list[dict], int | None, int | None]:
    """Return the records before the first invalid one, and the number and offset of the invalid record (None if all records
    are valid).
    """
    payloads, bad_offset = unframe(data)
    good: list[dict] = []
    sizes = None
    offset = 0
    for number, payload in enumerate(payloads):
        features = contract(payload, sizes)
        if features is None:
            return good, number, offset
        sizes = (len(features["input_ids"]), len(features["masked_lm_positions"]))
        good.append(features)
        offset += len(payload) + 16
    return good, (None if bad_offset is None else len(payloads)), bad_offset


def scan(path: Path, memory: np.ndarray) -> tuple[list[dict], RecordScan]:
    """Scan a file, and return its records and the finished scan."""
    schema, _ = read_record_schema(path)
    records = UnpackedFormat.for_scan_in_chunks(schema, memory)
    run = RecordScan(path, records, memory)
    found = []
    for _ in run.process_chunk_by_chunk():
        found += rows_of(records)
    return found, run


def rows_of(records: UnpackedFormat) -> list[dict]:
    """Decode the records to which the index points, and compare the index with the decoded records."""
    found = []
    buffer, offsets, rows = records.index
    for offset, row in zip(offsets[: records.rows], rows[: records.rows], strict=True):
        size = int(buffer[offset - 12 : offset - 4].view("<u8")[0]) if offset >= 12 else 0
        decoded = decode_example(buffer[offset : offset + size].tobytes())
        features = {key: decoded[key].tolist() for key in UNPACKED_KEYS}
        assert row["length"] == sum(features["input_mask"])
        assert row["masked"] == sum(features["masked_lm_weights"])
        assert row["label"] == features["next_sentence_labels"][0]
        found.append(features)
    return found


def check(mutant: Mutant, path: Path, guarded: GuardedBuffer, piece_buffer: np.ndarray) -> str:
    """Scan one mutant in both kinds of buffers, and return "refused" or "read". Raise an error if the result is wrong."""
    path.write_bytes(mutant.data)
    good, bad_number, bad_offset = expectation(mutant.data)
    outcomes = set()
    for memory in (guarded.of(FRONT_BYTES + len(mutant.data), mutant.number % 2 == 0), piece_buffer):
        try:
            found, run = scan(path, memory)
        except InputError as error:
            message = str(error)
            assert message.startswith(str(path)), message
            assert "\n" not in message, message
            assert bad_number is not None or not mutant.data, f"a good file was refused: {message}"
            place = re.search(r"record (\d+) at byte (\d+)", message)
            if place is None:  # the file does not begin with a record
                assert bad_offset in (0, None), message
            else:
                assert (int(place[1]), int(place[2])) == (bad_number, bad_offset), (
                    f"{message}, not {bad_number} at {bad_offset}"
                )
            outcomes.add("refused")
        else:
            assert bad_number is None, f"record {bad_number} at {bad_offset} was not refused"
            assert found == good
            assert (run.file_bytes, run.file_crc32c) == (len(mutant.data), crc32c(mutant.data))
            if mutant.data != mutant.original:
                assert (run.file_bytes, run.file_crc32c) != (len(mutant.original), crc32c(mutant.original))
            outcomes.add("read")
    assert len(outcomes) == 1, outcomes
    return outcomes.pop()


def main(seed: int, count: int, folder: Path) -> int:
    """Scan a number of mutants, print a summary, and return the exit code."""
    if protobuf_example.IMPLEMENTATION != "python":
        sys.exit("set PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python: the compiled parsers differ from it")
    path = folder / "part-00000.tfrecord"
    guarded, piece_buffer = GuardedBuffer(), allocate_scan_buffer()
    outcomes: Counter[str] = Counter()
    failures = 0
    before = 0
    for mutant in mutants(seed, count):
        try:
            outcomes[check(mutant, path, guarded, piece_buffer)] += 1
        except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, MemoryError, zlib.error) as error:
            failures += 1
            if failures <= 10:
                print(f"mutant {mutant.number} of seed {seed} ({mutant.kind}): {type(error).__name__}: {error}", flush=True)
        if mutant.number == 200:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print(f"done: {outcomes['refused']} refused, {outcomes['read']} read, {failures} wrong, {growth} MiB more memory")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
