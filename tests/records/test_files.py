"""RECORDS as a list of files, and the metadata of a packed folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gaudi_bert.artefacts.metadata import Metadata, Shard
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.files import find_vocabulary, list_record_files
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.schema import PackedSchema


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
