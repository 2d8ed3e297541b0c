"""TFRecord framing: what TensorFlow writes is read, and the other way round; file lists; metadata."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from pathlib import Path

import pytest

import tests.oracles.wire as naive
from gaudi_bert.artefacts.metadata import Metadata, Shard
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.files import find_vocabulary, list_record_files
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.schema import PackedSchema
from gaudi_bert.records.wire.framing import RecordStream, frame, read_records, write_record

PAYLOADS = [b"", b"a", bytes(range(256)) * 30, b"last"]


def test_frames_are_those_of_the_twin() -> None:
    for payload in PAYLOADS:
        assert frame(payload) == naive.frame(payload)
    handle = io.BytesIO()
    for payload in PAYLOADS:
        write_record(handle, payload)
    assert naive.unframe(handle.getvalue()) == (PAYLOADS, None)


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
    variants = {
        "": data,
        "GZIP": gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
        "ZLIB": zlib.compress(data),
    }
    for compression, content in variants.items():
        path = tmp_path / f"file{compression}"
        path.write_bytes(content)
        with RecordStream(path, checksum=True) as stream:
            assert stream.compression == compression
            view, total = memoryview(bytearray(977)), 0
            while count := stream.read_into(view):
                total += count
            assert total == len(data)
            assert (stream.file_bytes, stream.file_crc32c) == (len(content), naive.crc32c(content))
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
    for place, reason in ((third + 2, "its length is damaged"), (third + 50, "its bytes are damaged")):
        path.write_bytes(data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :])
        with pytest.raises(InputError, match=f"record 2 at byte {third}: {reason}"):
            list(read_records(path))
    for end in (third + 5, third + 12, len(data) - len(frame(b"last")) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(InputError, match=f"record 2 at byte {third}: the file is cut short"):
            list(read_records(path))
    path.write_bytes(data[:third] + naive.frame(b"", claimed_length=2**50))
    with pytest.raises(InputError, match=f"record 2 at byte {third}: {2**50} bytes long"):
        list(read_records(path))


def test_file_lists(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    (folder / "inner").mkdir(parents=True)
    for name in ("b.tfrecord", "a", "c.gz", ".hidden", "examples.json", "inner/d"):
        (folder / name).write_bytes(b"x")
    names = [file.name for file in list_record_files(folder)]
    assert names == ["a", "b.tfrecord", "c.gz"]
    assert [file.name for file in list_record_files(folder / "a")] == ["a"]
    assert [file.name for file in list_record_files(str(folder / "[bc]*"))] == ["b.tfrecord", "c.gz"]
    assert [file.bytes for file in list_record_files(f"{folder}/")] == [1, 1, 1]
    with pytest.raises(InputError, match="no file matches it"):
        list_record_files(str(folder / "z*"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_bytes(b"x")
    with pytest.raises(InputError, match="has the same name as"):
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
        assert [(file.name, file.bytes) for file in list_record_files(records)] == [("a", 1), ("linked", 3)]
    dangling, looping, pipe = folder / "dangling", folder / "looping", folder / "pipe"
    for entry, make, reason in (
        (
            dangling,
            lambda: dangling.symlink_to(tmp_path / "nowhere"),
            "a symbolic link to .*nowhere, which leads to no file",
        ),
        (looping, lambda: looping.symlink_to(looping), "a symbolic link to .*looping, which leads to no file"),
        (pipe, lambda: os.mkfifo(pipe), "a pipe, socket or device"),
    ):
        make()
        for records in (folder, str(folder / "*"), entry):
            with pytest.raises(InputError, match=f"{entry.name}: {reason}"):
                list_record_files(records)
        entry.unlink()


def metadata(**changes) -> Metadata:
    values = {
        "tool_version": "1",
        "max_sequence_length": 128,
        "max_predictions": 20,
        "masked_slots": 23,
        "depth": 3,
        "seed": 1,
        "algorithm": "nnls",
        "sequences": 2,
        "packs": 1,
        "tokens": 100,
        "padding_tokens": 28,
        "efficiency": 100 / 128,
        "packing_factor": 2.0,
        "lower_bound": 1,
        "gap": 0,
        "shard_multiple": 1,
        "inputs": (),
        "shards": (Shard(name="packed-00000-00000.tfrecord", packs=1, bytes=5, crc32c=7),),
        "histogram": (0,) * 128,
    }
    return Metadata.model_validate({**values, **changes})


def test_metadata_is_read_as_it_was_written(tmp_path: Path) -> None:
    kept = metadata()
    (tmp_path / "metadata.json").write_text(json.dumps(kept.model_dump(mode="json")))
    assert read_metadata(tmp_path) == kept
    assert PackedSchema.of(kept) == PackedSchema(128, 23, 3, 20)


def test_metadata_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run `gaudi-bert write` to its end"):
        read_metadata(tmp_path)
    content = metadata().model_dump(mode="json")
    for change, reason in (
        ({"format_version": 9}, "format_version 9, this version reads 1"),
        ({"depth": 0}, "`depth`"),
        ({"efficiency": 1.5}, "`efficiency`"),
        ({"surprise": 1}, "`surprise`"),
    ):
        (tmp_path / "metadata.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(InputError, match=reason):
            read_metadata(tmp_path)
