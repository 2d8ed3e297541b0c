"""RECORDS as a list of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.files import find_vocabulary, list_record_files


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
        assert list(list_record_files(records).items()) == [(folder / "a", 1), (folder / "linked", 3)]
    dangling, looping, pipe = folder / "dangling", folder / "looping", folder / "pipe"
    link = "a symbolic link to .*{}, which leads to no file"
    for entry, make, reason in (
        (dangling, lambda: dangling.symlink_to(tmp_path / "nowhere"), link.format("nowhere")),
        (looping, lambda: looping.symlink_to(looping), link.format("looping")),
        (pipe, lambda: os.mkfifo(pipe), "a pipe, socket or device"),
    ):
        make()
        for records in (folder, str(folder / "*"), entry):
            with pytest.raises(InputError, match=f"{entry.name}: {reason}"):
                list_record_files(records)
        entry.unlink()
