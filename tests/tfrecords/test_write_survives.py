"""The write stage against kills, full disks, read-only folders, files that vanish, and other writers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.tfrecords.histogram import histogram
from gaudi_bert.tfrecords.write import write
from tests.builders.folders import contents
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.reporters import QUIET
from tests.builders.small_disk import small_disk


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(
        tmp_path_factory.mktemp("case"), files=6, sequences_per_file=150, max_sequence_length=128, max_predictions=20
    )


def test_writers_of_different_groups_share_a_folder(case: PackingCase, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gaudi_bert.common.progress import Reporter;"
        "from gaudi_bert.tfrecords.write import write_shard;"
        "write_shard(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), (int(sys.argv[4]), 2), "
        "reporter=Reporter(quiet=True))"
    )
    arguments = [case.records, case.plan, tmp_path / "out"]
    writers = [subprocess.Popen([sys.executable, "-c", code, *arguments, str(number)]) for number in range(2)]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    write(case.records, case.plan, tmp_path / "out", finish=True, reporter=QUIET)
    assert contents(tmp_path / "out") == contents(case.packed)


def looks_finished(out: Path) -> bool:
    return (out / "metadata.json").exists()


def test_a_full_disk_is_said_and_the_run_is_resumed(case: PackingCase, tmp_path: Path) -> None:
    packed_bytes = sum(len(data) for data in contents(case.packed).values())
    with small_disk(tmp_path / "disk", str(int(packed_bytes * 0.6))) as disk:
        out = disk / "packed"
        with pytest.raises(FailedError, match="No space left on device; free some space") as caught:
            write(case.records, case.plan, out, reporter=QUIET)
        assert "\n" not in str(caught.value)
        assert not looks_finished(out)
        for name, data in contents(out).items():
            if name.startswith("packed-"):
                assert data == (case.packed / name).read_bytes(), "a shard that is there is whole"
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        write(case.records, case.plan, out, reporter=QUIET)
        assert contents(out) == contents(case.packed)


def test_a_read_only_folder_is_said(case: PackingCase, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(FailedError, match="Read-only file system"):
            write(case.records, case.plan, disk / "packed", reporter=QUIET)
        with pytest.raises(FailedError, match="Read-only file system"):
            histogram(case.records, disk / "histogram.json", reporter=QUIET)


def test_a_limit_on_file_sizes_is_said(case: PackingCase, tmp_path: Path) -> None:
    """As a full disk, without a mount: the system refuses to let a file grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(FailedError, match="cannot write: File too large"):
            write(case.records, case.plan, tmp_path / "out", reporter=QUIET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not looks_finished(tmp_path / "out")
    assert not list((tmp_path / "out").glob("group-*"))
    write(case.records, case.plan, tmp_path / "out", reporter=QUIET)
    assert contents(tmp_path / "out") == contents(case.packed)


def test_a_file_that_vanishes_midway_is_said(case: PackingCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is there when the run begins, and gone when its group is read."""
    from gaudi_bert.tfrecords.scanning import group

    records = tmp_path / "records"
    records.mkdir()
    for path in case.records.iterdir():
        os.link(path, records / path.name)
    usual = group.uncompressed_bytes
    reads: list[str] = []

    def vanish(path: Path) -> int:
        size = usual(path)
        reads.append(path.name)
        if len(reads) > 6 and path.exists():  # after the sizes of all files, when a group is read
            path.unlink()
        return size

    monkeypatch.setattr(group, "uncompressed_bytes", vanish)
    with pytest.raises(InputError, match=r"part-\d: cannot read: No such file or directory"):
        write(records, case.plan, tmp_path / "out", reporter=QUIET)
    assert not looks_finished(tmp_path / "out")
