"""RECORDS as a list of files; bad records and foreign files are one line that names file and record."""

from __future__ import annotations

import gzip
import io
import os
import random
import re
import shutil
import struct
import tarfile
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.files import find_vocabulary, list_record_files
from gaudi_bert.tfrecords.histogram import histogram
from gaudi_bert.tfrecords.write import write
from tests.builders.packing_case import make_case
from tests.builders.reporters import QUIET
from tests.oracles.wire import example, frame, random_sequence


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


# --- bad input: one line with file and record, and nothing written that looks finished


def good(seed: int) -> dict:
    return random_sequence(random.Random(seed), 24, 4)


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def refused_by_histogram(records: Path | str, out: Path, *parts: str) -> None:
    """In one line that names what it must, and nothing is written."""
    with pytest.raises(InputError) as caught:
        histogram(records, out, reporter=QUIET)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    assert not out.exists()


def test_a_bad_record_is_refused_by_file_and_record(tmp_path: Path) -> None:
    """What is bad is in tests/tfrecords/scanning/test_scan.py."""
    folder = tmp_path / "records"
    folder.mkdir()
    before = b"".join(frame(example(good(seed))) for seed in range(5))
    (folder / "a").write_bytes(before)
    for bad, reason in (
        (frame(example({**good(1), "next_sentence_labels": [2]})), "`next_sentence_labels` is 2"),
        (frame(example(random_sequence(random.Random(3), 32, 4))), "has 32 values, 24 are needed"),
    ):
        (folder / "b").write_bytes(before + bad + before)
        refused_by_histogram(folder, tmp_path / "out.json", f"{folder / 'b'}: record 5 at byte {len(before)}", reason)


def test_what_is_not_there_or_no_tfrecord_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"This is a text and not a TFRecord at all.\n" * 10)
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "packed").write_bytes(frame(example({**good(1), "positions": [0], "next_sentence_positions": [0]})))
    for name, reason in {
        "missing": "no such folder or file",
        "empty-folder": "holds no record files",
        "empty": "the file is empty",
        "text": "not a TFRecord file",
        "short": "not a TFRecord file",
        "packed": "this is a packed example",
    }.items():
        refused_by_histogram(tmp_path / name, tmp_path / "histogram.json", str(tmp_path / name), reason)


def test_every_stage_refuses_a_file_that_changed_since_it_was_counted(tmp_path: Path) -> None:
    """The same size, legal records, but not those of the plan."""
    case = make_case(tmp_path, files=3, sequences_per_file=5)
    target = case.records / "part-1"
    original = target.read_bytes()
    payload_size = struct.unpack_from("<Q", original)[0]
    first, rest = original[: payload_size + 16], original[payload_size + 16 :]
    out = tmp_path / "again"
    for data, reason in (
        (rest + first, "crc32c"),
        (original + first, "in the plan"),
        (rest, "in the plan"),
        (flip(original, len(original) // 2), "damaged"),
    ):
        target.write_bytes(data)
        with pytest.raises(InputError, match=f"^{target}: .*{reason}"):
            write(case.records, case.plan, out, reporter=QUIET, workers=1)
        assert not (out / "metadata.json").exists()
        assert not [path for path in out.glob("group-*.json") if "part-1" in path.read_text()]
    target.write_bytes(original)
    write(case.records, case.plan, out, reporter=QUIET)
    assert (out / "metadata.json").read_bytes() == (case.packed / "metadata.json").read_bytes()


# --- files that are not records at all: refused by what they are, with the way in


def tar_of(names: list[str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 3
            archive.addfile(entry, io.BytesIO(b"abc"))
    return stream.getvalue()


FOREIGN = {
    "shard-000.tar": (tar_of(["0001.txt"]), "a tar archive, as WebDataset"),
    "shard-000.tar.gz": (gzip.compress(tar_of(["0001.txt"])), "a tar archive, as WebDataset"),
    "data.idx": (b"MMIDIDX\x00\x00" + bytes(30), "one of the two files of a Megatron data set"),
    "data.bin": (bytes(range(200)), "one of the two files of a Megatron data set"),
    "table.parquet": (b"PAR1" + bytes(40), "a Parquet table;"),
    "table.arrow": (b"ARROW1\0\0" + bytes(40), "an Arrow table;"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_foreign_is_named(tmp_path: Path, name: str) -> None:
    content, reason = FOREIGN[name]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / name).write_bytes(content)
    if name == "data.bin":
        (tmp_path / "records" / "data.idx").write_bytes(FOREIGN["data.idx"][0])
    refused_by_histogram(tmp_path / "records", tmp_path / "histogram.json", f"{name}: ", reason, "`gaudi-bert import`")


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["part-0", "part-1"], "part-*"),
        (["part-00000-of-00012.tfrecord", "part-00001-of-00012.tfrecord"], "part-*-of-*.tfrecord"),
        (["a[1].gz", "a[22].gz", "vocab.txt"], "a[[]*].gz"),
    ],
)
def test_a_foreign_file_is_refused_with_the_pattern_of_the_others(tmp_path: Path, names: list[str], pattern: str) -> None:
    case = make_case(tmp_path, files=1)
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name in names:
        shutil.copy(case.records / "part-0", folder / name)
    (folder / "notes.txt").write_text("These are notes of some length.\n")
    offered = f"'{folder / pattern}'"
    with pytest.raises(InputError, match=rf"notes\.txt: not a TFRecord .* by a pattern: {re.escape(offered)}$"):
        histogram(folder, tmp_path / "again.json", reporter=QUIET)
    made = histogram(offered.strip("'"), tmp_path / "again.json", reporter=QUIET)
    assert len(made.content.files) == 2


@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_a_file_of_no_records_is_refused_wherever_it_stands(tmp_path: Path, name: str) -> None:
    case = make_case(tmp_path, files=2)
    (case.records / name).write_bytes(gzip.compress(b""))
    refused_by_histogram(case.records, tmp_path / "again.json", f"{name}: holds no record; remove it, or make it again")


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=1)
    os.rename(case.records / "part-0", os.fsencode(case.records) + b"/part-\xff")
    refused_by_histogram(case.records, tmp_path / "again.json", "its name is not UTF-8")
