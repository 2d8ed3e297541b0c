"""Bad input: one clear line with file and record, a non-zero exit code, and nothing written that looks finished."""

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

from gaudi_bert.common.errors import GaudiBertError, InputError
from gaudi_bert.tfrecords.histogram import histogram
from gaudi_bert.tfrecords.write import write
from tests.builders.packing_case import make_case
from tests.builders.reporters import QUIET
from tests.oracles.wire import example, frame, random_sequence


def good(seed: int) -> dict:
    return random_sequence(random.Random(seed), 24, 4)


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def refused(error: GaudiBertError, *parts: str) -> None:
    """The message is one line and names what it must."""
    text = str(error)
    assert error.exit_code in (1, 2)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


def test_a_bad_record_is_refused_by_file_and_record(tmp_path: Path) -> None:
    """What is bad is in tests/tfrecords/scanning/test_scan.py."""
    folder = tmp_path / "records"
    folder.mkdir()
    before = b"".join(frame(example(good(seed))) for seed in range(5))
    (folder / "a").write_bytes(before)
    for bad, reason in (
        (frame(example({**good(1), "next_sentence_labels": [2]})), "`next_sentence_labels` is 2"),
        (frame(example(good(1)).replace(b"input_ids", b"inputXids")), "`input_ids` is missing"),
        (frame(example(random_sequence(random.Random(3), 32, 4))), "has 32 values, 24 are needed"),
    ):
        (folder / "b").write_bytes(before + bad + before)
        with pytest.raises(InputError) as caught:
            histogram(folder, tmp_path / "histogram.json", reporter=QUIET)
        refused(caught.value, f"{folder / 'b'}: record 5 at byte {len(before)}", reason)
        assert not (tmp_path / "histogram.json").exists()


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
        with pytest.raises(InputError) as caught:
            histogram(tmp_path / name, tmp_path / "histogram.json", reporter=QUIET)
        refused(caught.value, str(tmp_path / name), reason)
        assert not (tmp_path / "histogram.json").exists()


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
        with pytest.raises(InputError) as caught:
            write(case.records, case.plan, out, reporter=QUIET, workers=1)
        refused(caught.value, str(target), reason)
        assert not (out / "metadata.json").exists()
        in_group = [path for path in out.glob("group-*.json") if "part-1" in path.read_text()]
        assert not in_group
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
    "shard-000.tar": (tar_of(["0001.txt"]), "a tar archive, as WebDataset writes them; .*gaudi-bert import"),
    "shard-000.tar.gz": (
        gzip.compress(tar_of(["0001.txt"])),
        "a tar archive, as WebDataset writes them; .*gaudi-bert import",
    ),
    "data.idx": (b"MMIDIDX\x00\x00" + bytes(30), r"one of the two files of a Megatron data set .*gaudi-bert import"),
    "data.bin": (bytes(range(200)), r"one of the two files of a Megatron data set .*gaudi-bert import"),
    "table.parquet": (b"PAR1" + bytes(40), "a Parquet table; run `gaudi-bert import`"),
    "table.arrow": (b"ARROW1\0\0" + bytes(40), "an Arrow table; run `gaudi-bert import`"),
    "nothing.gz": (gzip.compress(b""), "holds no record; remove it"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_foreign_is_named(tmp_path: Path, name: str) -> None:
    content, reason = FOREIGN[name]
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / name).write_bytes(content)
    if name == "data.bin":
        (tmp_path / "records" / "data.idx").write_bytes(FOREIGN["data.idx"][0])
    with pytest.raises(InputError, match=rf"{name}: .*{reason}") as caught:
        histogram(tmp_path / "records", tmp_path / "histogram.json", reporter=QUIET)
    assert "\n" not in str(caught.value)


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
    with pytest.raises(InputError, match=rf"{name}: holds no record; remove it, or make it again"):
        histogram(case.records, tmp_path / "again.json", reporter=QUIET)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=1)
    os.rename(case.records / "part-0", os.fsencode(case.records) + b"/part-\xff")
    with pytest.raises(InputError, match="its name is not UTF-8"):
        histogram(case.records, tmp_path / "again.json", reporter=QUIET)
