"""Holds the scan to protobuf's pure-Python parser and the contract on damaged files; a program, so that a crash is its own.

    PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python python fuzz_scan.py SEED COUNT FOLDER

Each mutant is scanned from a buffer of exactly its size next to a page without access, after it or before it in turn: a
kernel that reads one byte outside is killed by the processor. The last line printed is `done` with the counts.
"""

from __future__ import annotations

import re
import resource
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.scanning.scan import FRONT_BYTES, RecordScan, UnpackedFormat, scan_buffer, unpacked_schema
from gaudi_bert.tfrecords.wire.example import decode_example
from tests.builders.guarded_memory import GuardedBuffer
from tests.builders.record_mutations import Mutant, mutants
from tests.oracles import protobuf_example
from tests.oracles.wire import FLOAT_KEYS, UNPACKED_KEYS, crc32c, unframe


def contract(payload: bytes, sizes: tuple[int, int] | None) -> dict | None:
    """The features of a payload by protobuf's parser, or None where they break the contract."""
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
    return all(0 <= value < bound for value in values[:used]) and not any(values[used:])


def expectation(data: bytes) -> tuple[list[dict], int | None, int | None]:
    """The records before the first that is refused, its number and its offset (None: all are good)."""
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
    schema, _ = unpacked_schema(path)
    records = UnpackedFormat.for_pieces(schema, memory)
    run = RecordScan(path, records, memory)
    found = []
    for _ in run.pieces():
        found += rows_of(records)
    return found, run


def rows_of(records: UnpackedFormat) -> list[dict]:
    """The records that the index points to, decoded, with the index itself held to what they are."""
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
    """Scan one mutant in both ways; "refused" or "read". Anything that is not right raises."""
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
            if place is None:  # the first bytes are not those of a record
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
    if protobuf_example.IMPLEMENTATION != "python":
        sys.exit("set PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python: the compiled parsers differ from it")
    path = folder / "part-00000.tfrecord"
    guarded, piece_buffer = GuardedBuffer(), scan_buffer()
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
