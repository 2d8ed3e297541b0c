"""TFRecord framing against the twin and TensorFlow; damage is named."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import pytest

import tests.oracles.wire as naive
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.wire.framing import RecordStream, frame, read_records
from tests.oracles.wire import flipped

PAYLOADS = [b"", b"a", bytes(range(256)) * 30, b"last"]
DATA = b"".join(map(frame, PAYLOADS))


def test_frames_are_those_of_the_twin() -> None:
    for payload in PAYLOADS:
        assert frame(payload) == naive.frame(payload)
    assert naive.unframe(DATA) == (PAYLOADS, None)


def test_tensorflow_reads_ours_and_we_read_tensorflows(tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    (tmp_path / "ours").write_bytes(DATA)
    read = [record.numpy() for record in tensorflow.data.TFRecordDataset(str(tmp_path / "ours"))]
    assert read == PAYLOADS
    for compression in ("", "GZIP", "ZLIB"):
        path = tmp_path / f"theirs-{compression}"
        with tensorflow.io.TFRecordWriter(str(path), compression) as writer:
            for payload in PAYLOADS:
                writer.write(payload)
        assert list(read_records(path)) == PAYLOADS


@pytest.mark.parametrize(
    ("compression", "content"),
    [("", DATA), ("GZIP", gzip.compress(DATA[:1000]) + gzip.compress(DATA[1000:])), ("ZLIB", zlib.compress(DATA))],
    ids=["plain", "gzip", "zlib"],
)
def test_compression_is_seen_and_members_follow_each_other(tmp_path: Path, compression: str, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with RecordStream(path) as stream:
        assert stream.compression == compression
        view, total = memoryview(bytearray(977)), 0
        while count := stream.read_into(view):
            total += count
        assert total == len(DATA)
        assert (stream.file_bytes, stream.file_crc32c) == (len(content), naive.crc32c(content) if compression else 0)
    assert list(read_records(path)) == PAYLOADS


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-5], lambda data: data[: len(data) // 2], lambda data: flipped(data, 40, 255)],
    ids=["without its end", "cut in half", "changed"],
)
@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_damaged_compression_is_refused(tmp_path: Path, compress, damage) -> None:
    path = tmp_path / "file"
    path.write_bytes(damage(compress(DATA * 50)))
    with pytest.raises(InputError, match=str(path)):
        list(read_records(path))


THIRD = len(frame(PAYLOADS[0]) + frame(PAYLOADS[1]))  # the offset of record 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (flipped(DATA, THIRD + 2, 8), "the record is damaged, because the CRC of its length"),
        (flipped(DATA, THIRD + 50, 8), "the record is damaged"),
        (DATA[: THIRD + 5], "the file ends within this record"),
        (DATA[: THIRD + 12], "the file ends within this record"),
        (DATA[: -len(frame(b"last")) - 1], "the file ends within this record"),
        (DATA[:THIRD] + naive.frame(b"", claimed_length=2**50), "the record is longer than"),
    ],
    ids=["length changed", "payload changed", "cut in length", "cut after length", "cut before end", "too long"],
)
def test_damage_names_record_and_offset(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=f"record 2 at byte {THIRD}: {reason}"):
        list(read_records(tmp_path / "file"))
