"""A group that memory cannot hold is refused before it is read; the estimate is what a group that was read does take."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.histogram import CountedFile, HistogramFile
from gaudi_bert.artefacts.plan import WritablePlan
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.plan import plan
from gaudi_bert.tfrecords.wire.schema import PackedSchema
from gaudi_bert.tfrecords.write import available_bytes, buffer_bytes, group_memory_bytes, read_group, write
from tests.builders.folders import contents
from tests.builders.packing_case import make_case
from tests.builders.reporters import QUIET


def huge_plan(folder: Path, files: int, **settings: int) -> None:
    """A plan of files of 100 TB in all, which are holes: whoever reads them is busy for days."""
    (folder / "records").mkdir()
    rows = np.array([[length, length // 7, 10**9] for length in (300, 200, 40)])
    figures = {"sequences": 3 * 10**9, "tokens": 540 * 10**9, "bytes": 10**14 // files, "crc32c": 1, "counts": rows}
    counted = tuple(CountedFile(name=f"part-{number}", **figures) for number in range(files))
    for file in counted:
        with open(folder / "records" / file.name, "wb") as handle:
            try:
                os.truncate(handle.fileno(), file.bytes)
            except OSError:
                pytest.skip("NOT TESTED HERE: the file system has no files of 10 TB")
    counts = np.zeros(512, np.int64)
    np.add.at(counts, rows[:, 0] - 1, files * rows[:, 2])
    content = HistogramFile(max_sequence_length=512, max_predictions=76, counts=tuple(counts.tolist()), files=counted)
    content.write(folder / "histogram.json")
    plan([folder / "histogram.json"], folder / "plan.json", PackingSettings(algorithm="lpfhp", **settings), reporter=QUIET)


def test_a_single_file_is_to_be_split(tmp_path: Path) -> None:
    huge_plan(tmp_path, 10)
    with pytest.raises(InputError) as caught:
        write(tmp_path / "records", tmp_path / "plan.json", tmp_path / "packed", reporter=QUIET)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/records/part-")
    assert "group 0 has 3,000,000,000 sequences in 1 file and is packed in memory: at least 1.8" in message
    assert message.endswith("are available; split the file into several, then make the histogram and the plan again")
    assert [name for name in contents(tmp_path / "packed") if name != "settings.json"] == []


def test_of_several_files_the_group_may_be_smaller(tmp_path: Path) -> None:
    huge_plan(tmp_path, 10, group_bytes=10**15, group_sequences=10**15)
    with pytest.raises(InputError, match=r"in 10 files .*; lower packing.group_bytes or packing.group_sequences, or split"):
        write(tmp_path / "records", tmp_path / "plan.json", tmp_path / "packed", reporter=QUIET)


def test_the_estimate_is_a_little_below_what_a_group_takes(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=2, sequences_per_file=400, max_sequence_length=512, max_predictions=76)
    planned = WritablePlan.read(case.plan)
    group, files = planned.group(0), planned.group_files(0)
    paths = [case.records / file.name for file in files]
    buffer = np.zeros(buffer_bytes(paths), np.uint8)
    read = read_group(paths, files, PackedSchema.of(planned).unpacked, buffer, 1, lambda _: None)
    sizes = sum(int(read.rows[name].sum()) for name in ("ids_bytes", "length", "masked_ids_bytes", "positions_bytes"))
    taken = sizes + read.rows.nbytes + read.offsets.nbytes
    assert 0.6 * taken < group_memory_bytes(group) < 1.1 * taken


def test_available_memory_is_that_of_the_machine_or_of_the_container(tmp_path: Path) -> None:
    real = available_bytes()
    assert real is not None
    assert 2**20 < real < 2**50
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert available_bytes(meminfo, cgroup) is None
    meminfo.write_text("MemTotal:       99 kB\nMemAvailable:   50 kB\n")
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, cgroup) == 50 * 1024
    (cgroup / "memory.max").write_text("2048\n")
    assert available_bytes(meminfo, cgroup) == 2048
