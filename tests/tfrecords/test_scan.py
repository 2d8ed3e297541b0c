"""RECORDS as a list of files; and the scan: what other writers may write, read as protobuf reads it and put into one form;
damage is refused and named."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.scan import (
    RecordScan,
    UnpackedFormat,
    _encode_canonical_example,
    allocate_scan_buffer,
    find_vocabulary,
    list_record_files,
    read_record_schema,
)
from gaudi_bert.tfrecords.verify import verify_records
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema
from tests.builders.effort import tries
from tests.builders.packing_case import make_case
from tests.builders.reporters import a_run
from tests.oracles.wire import (
    FLOAT_KEYS,
    UNPACKED_KEYS,
    example,
    field,
    flipped,
    frame,
    packed_list,
    random_sequence,
    split_list,
    unpacked_list,
    varint,
)
from tests.tfrecords.wire.test_schema import broken
from tools.fuzz_scan import single_values_unpacked

# --- RECORDS as a list of files


def test_file_lists(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    (folder / "inner").mkdir(parents=True)
    passed_over = (".hidden", "examples.json", "_SUCCESS", "_metadata", "._a", "README", "README.md", "README.txt")
    for name in ("b.tfrecord", "a", "c.gz", "inner/d", *passed_over):
        (folder / name).write_bytes(b"x")
    names = [file.name for file in list_record_files(folder)]
    assert names == ["a", "b.tfrecord", "c.gz"]
    assert [file.name for file in list_record_files(folder / "a")] == ["a"]
    assert [file.name for file in list_record_files(str(folder / "[bc]*"))] == ["b.tfrecord", "c.gz"]
    assert [file.name for file in list_record_files(str(folder / "*"))] == names
    assert list(list_record_files(f"{folder}/").values()) == [1, 1, 1]
    with pytest.raises(InputError, match="no file matches it"):
        list_record_files(str(folder / "z*"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_bytes(b"x")
    with pytest.raises(InputError, match="must not have the same name as"):
        list_record_files(str(tmp_path / "*" / "a"))
    assert find_vocabulary(folder) is None
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    for records in (folder, folder / "a", str(folder / "*")):
        assert find_vocabulary(records) == tmp_path.resolve() / "vocab.txt"


def test_entries_that_cannot_be_read_are_not_left_out_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "a").write_bytes(b"x")
    (tmp_path / "elsewhere").write_bytes(b"xyz")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / ".hidden-link").symlink_to(tmp_path / "nowhere")
    (folder / "left-out.json").symlink_to(tmp_path / "nowhere")
    (folder / "linked-folder").symlink_to(tmp_path)
    for records in (folder, str(folder / "*")):
        assert list(list_record_files(records).items()) == [(folder / "a", 1), (folder / "linked", 3)]
    dangling, looping, pipe = folder / "dangling", folder / "looping", folder / "pipe"
    link = "the file is a symbolic link to .*{}, which does not exist"
    for entry, make, reason in (
        (dangling, lambda: dangling.symlink_to(tmp_path / "nowhere"), link.format("nowhere")),
        (looping, lambda: looping.symlink_to(looping), link.format("looping")),
        (pipe, lambda: os.mkfifo(pipe), "expected a file, found a pipe, socket or device"),
    ):
        make()
        for records in (folder, str(folder / "*"), entry):
            with pytest.raises(InputError, match=f"{entry.name}: {reason}"):
                list_record_files(records)
        entry.unlink()


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"part-\xff")).write_bytes(b"x")
    with pytest.raises(InputError, match="the file name must be UTF-8"):
        list_record_files(tmp_path)


# --- one file

LENGTH, PREDICTIONS = 13, 5
SCHEMA = UnpackedSchema(LENGTH, PREDICTIONS)


def sequence(seed: int) -> dict:
    return random_sequence(random.Random(seed), LENGTH, PREDICTIONS)


def scanned(path: Path) -> Iterator[bytes]:
    """The records of a file as the scan leaves them in its buffer: in canonical encoding, if it had to change them."""
    buffer = allocate_scan_buffer()
    records = UnpackedFormat.for_scan_in_chunks(read_record_schema(path)[0], buffer)
    for _ in RecordScan(path, records, buffer).process_chunk_by_chunk():
        for offset in records.index.offsets[: records.rows]:
            size = int(buffer[offset - 12 : offset - 4].view("<u8")[0])
            yield buffer[offset : offset + size].tobytes()


def overlong_list(key: str, values: list) -> bytes:
    """Packed, each varint with a needless byte."""
    if key in FLOAT_KEYS:
        return packed_list(key, values)
    return field(1, b"".join(varint(value, 1) for value in values))


def test_the_canonical_form_is_protobufs_deterministic_serialisation() -> None:
    protobuf_example = pytest.importorskip("tests.oracles.protobuf_example", exc_type=ImportError)
    for features in map(sequence, range(20)):
        assert _encode_canonical_example(example(features, encode=split_list), SCHEMA) == protobuf_example.serialize(
            features
        )


def test_a_value_in_two_halves_is_merged_and_unknown_fields_are_skipped() -> None:
    """As protobuf's parser does; repeated keys and messages are among the mutants below."""
    for seed, key in enumerate(UNPACKED_KEYS):
        features, number = sequence(seed), 2 if key in FLOAT_KEYS else 3
        halves = [field(number, packed_list(key, part)) for part in (features[key][:1], features[key][1:])]
        entry = field(1, field(1, key.encode()) + field(2, b"".join(halves))) + field(9, b"?")
        others = {name: values for name, values in features.items() if name != key}
        payload = field(7, b"later") + example(others, extra=entry) + varint(5 << 3) + varint(3)
        assert _encode_canonical_example(payload, SCHEMA) == _encode_canonical_example(example(features), SCHEMA)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda good: frame(example(broken(input_mask=(2, 0)))), "`input_mask` must contain ones and then zeros"),
        (lambda good: frame(b"\xff" * 6), "not a tf.train.Example"),
        (lambda good: flipped(good, 60), "the record is damaged"),
        (lambda good: flipped(good, 1), "the record is damaged, because the CRC of its length"),
        (lambda good: frame(b"", claimed_length=2**40), "the record is longer than"),
        *((lambda good, cut=cut: good[:cut], "the file ends within this record") for cut in (1, 5, 12, 30)),
    ],
)
def test_refusals_name_file_record_and_offset(tmp_path: Path, damage, reason: str) -> None:
    path, good = tmp_path / "part-3", frame(example(broken()))
    path.write_bytes(good + good + damage(good))
    with pytest.raises(InputError, match=rf"part-3: record 2 at byte {2 * len(good)}: .*{reason}"):
        list(scanned(path))


def test_a_weight_of_minus_zero_is_zero() -> None:
    assert _encode_canonical_example(example(broken(masked_lm_weights=(4, -0.0))), SCHEMA) == example(broken())


def mixed(key: str, values: list) -> bytes:
    """Another encoding for each list."""
    return (packed_list, unpacked_list, split_list, overlong_list)[len(key) % 4](key, values)


@pytest.mark.parametrize(
    ("max_predictions", "encode", "compress"),
    [
        (1, unpacked_list, bytes),
        (1, single_values_unpacked, bytes),
        (5, packed_list, gzip.compress),
        (5, mixed, bytes),
        (1, mixed, zlib.compress),
    ],
)
def test_packs_do_not_depend_on_how_the_records_were_written(tmp_path: Path, max_predictions: int, encode, compress) -> None:
    sizes = {"max_predictions": max_predictions, "files": 3}
    usual = make_case(tmp_path / "usual", **sizes)
    other = make_case(tmp_path / "other", encode=encode, compress=compress, **sizes)
    shards = sorted(path.name for path in usual.packed.glob("*.tfrecord"))
    assert shards == sorted(path.name for path in other.packed.glob("*.tfrecord"))
    for name in shards:
        assert (other.packed / name).read_bytes() == (usual.packed / name).read_bytes()
    assert verify_records(other.records, other.packed, a_run()).content.sequences == len(usual.sequences)


# --- thousands of damaged files: each is refused by file and offset, or read for exactly what it still holds

SEED, COUNT = 20, tries(1000, 20_000)


@pytest.mark.repeated
def test_mutants_are_read_as_protobuf_reads_them(repository: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    command = [sys.executable, "-m", "tools.fuzz_scan", str(SEED), str(COUNT), str(tmp_path)]
    result = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=900, env=environment, check=False
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0, "\n".join([f"exit code {result.returncode}", *lines, *result.stderr.splitlines()[-20:]])
    words = lines[-1].split()
    refused, read, more_memory = int(words[1]), int(words[3]), int(words[7])
    assert refused + read == COUNT
    assert refused > COUNT // 2
    assert read > COUNT // 20
    assert more_memory < 64
