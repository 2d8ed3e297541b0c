"""Files that are no records of ours are refused by what they are, with the way in; so are records that are none."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.data.histogram import histogram
from tests.builders.packing_case import make_case


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
        histogram(tmp_path / "records", tmp_path / "histogram.json", reporter=Reporter(quiet=True))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_a_file_of_no_records_is_refused_wherever_it_stands(tmp_path: Path, name: str) -> None:
    case = make_case(tmp_path, files=2)
    (case.records / name).write_bytes(gzip.compress(b""))
    with pytest.raises(InputError, match=rf"{name}: holds no record; remove it, or make it again"):
        histogram(case.records, tmp_path / "again.json", reporter=Reporter(quiet=True))


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=1)
    os.rename(case.records / "part-0", os.fsencode(case.records) + b"/part-\xff")
    with pytest.raises(InputError, match="its name is not UTF-8"):
        histogram(case.records, tmp_path / "again.json", reporter=Reporter(quiet=True))
