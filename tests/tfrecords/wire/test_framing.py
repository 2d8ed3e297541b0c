"""TFRecord framing against the twin and TensorFlow; damage is named."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import pytest

import tests.oracles.wire as naive
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.wire.framing import RecordStream, frame, read_records

PAYLOADS = [b"", b"a", bytes(range(256)) * 30, b"last"]


def test_frames_are_those_of_the_twin() -> None:
    for payload in PAYLOADS:
        assert frame(payload) == naive.frame(payload)
    assert naive.unframe(b"".join(map(frame, PAYLOADS))) == (PAYLOADS, None)


def test_tensorflow_reads_ours_and_we_read_tensorflows(tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    (tmp_path / "ours").write_bytes(b"".join(frame(payload) for payload in PAYLOADS))
    read = [record.numpy() for record in tensorflow.data.TFRecordDataset(str(tmp_path / "ours"))]
    assert read == PAYLOADS
    for compression in ("", "GZIP", "ZLIB"):
        path = tmp_path / f"theirs-{compression}"
        with tensorflow.io.TFRecordWriter(str(path), compression) as writer:
            for payload in PAYLOADS:
                writer.write(payload)
        assert list(read_records(path)) == PAYLOADS


def test_compression_is_seen_and_members_follow_each_other(tmp_path: Path) -> None:
    data = b"".join(frame(payload) for payload in PAYLOADS)
    variants = {"": data, "GZIP": gzip.compress(data[:1000]) + gzip.compress(data[1000:]), "ZLIB": zlib.compress(data)}
    for compression, content in variants.items():
        path = tmp_path / f"file{compression}"
        path.write_bytes(content)
        with RecordStream(path) as stream:
            assert stream.compression == compression
            view, total = memoryview(bytearray(977)), 0
            while count := stream.read_into(view):
                total += count
            assert total == len(data)
            assert (stream.file_bytes, stream.file_crc32c) == (len(content), naive.crc32c(content) if compression else 0)
        assert list(read_records(path)) == PAYLOADS


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_damaged_compression_is_refused(tmp_path: Path, compress) -> None:
    data = compress(b"".join(frame(payload) for payload in PAYLOADS * 50))
    path = tmp_path / "file"
    for damaged in (data[:-5], data[: len(data) // 2], data[:40] + bytes([data[40] ^ 255]) + data[41:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=str(path)):
            list(read_records(path))


def test_damage_names_record_and_offset(tmp_path: Path) -> None:
    data = b"".join(frame(payload) for payload in PAYLOADS)
    third = len(frame(PAYLOADS[0])) + len(frame(PAYLOADS[1]))
    path = tmp_path / "file"
    for place, reason in (
        (third + 2, "the record is damaged, because the CRC of its length"),
        (third + 50, "the record is damaged"),
    ):
        path.write_bytes(data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :])
        with pytest.raises(InputError, match=f"record 2 at byte {third}: {reason}"):
            list(read_records(path))
    for end in (third + 5, third + 12, len(data) - len(frame(b"last")) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(InputError, match=f"record 2 at byte {third}: the file ends within this record"):
            list(read_records(path))
    path.write_bytes(data[:third] + naive.frame(b"", claimed_length=2**50))
    with pytest.raises(InputError, match=f"record 2 at byte {third}: the record is longer than"):
        list(read_records(path))
