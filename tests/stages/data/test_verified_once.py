"""A folder is verified once, by whatever command; what was written or changed since is verified again."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PackingSettings
from gaudi_bert.stages.data.histogram import histogram
from gaudi_bert.stages.data.plan import plan
from gaudi_bert.stages.data.verify import verify
from gaudi_bert.stages.data.write import write
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.small_disk import make_read_only, small_disk

QUIET = Reporter(quiet=True)


@pytest.fixture
def case(tmp_path: Path) -> PackingCase:
    return make_case(tmp_path, files=2)


def later(path: Path) -> None:
    """Give `path` a moment after all that was written before."""
    time.sleep(0.02)
    os.utime(path)


def test_what_was_verified_is_not_verified_again(case: PackingCase) -> None:
    first = verify(case.records, case.packed, reporter=QUIET)
    again = verify(case.records, case.packed, reporter=QUIET)
    assert (first.skipped, again.skipped) == (False, True)
    assert again.verification == first.verification
    assert not verify(case.records, case.packed, reporter=QUIET, overwrite=True).skipped


def test_a_folder_that_was_removed_and_written_anew_is_verified_anew(case: PackingCase) -> None:
    verify(case.records, case.packed, reporter=QUIET)
    shutil.rmtree(case.packed)
    write(case.records, case.plan, case.packed, reporter=QUIET)
    assert not verify(case.records, case.packed, reporter=QUIET).skipped


@pytest.mark.parametrize("side", ["records", "packed"])
def test_a_file_that_changed_since_is_noticed_though_its_size_is_the_same(case: PackingCase, side: str) -> None:
    verify(case.records, case.packed, reporter=QUIET)
    if side == "records":
        changed = case.records / "part-1"
    else:
        shards = json.loads((case.packed / "metadata.json").read_text())["shards"]
        changed = case.packed / next(shard["name"] for shard in shards if shard["packs"])
    before = changed.read_bytes()
    changed.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    later(changed)
    with pytest.raises(Exception, match=r"damaged|CRC"):
        verify(case.records, case.packed, reporter=QUIET)
    assert not (case.packed / "verification.json").exists()
    changed.write_bytes(before)
    assert not verify(case.records, case.packed, reporter=QUIET).skipped


def test_a_lost_shard_is_noticed(case: PackingCase) -> None:
    verify(case.records, case.packed, reporter=QUIET)
    next(case.packed.glob("packed-*")).unlink()
    with pytest.raises(FailedError, match="the shard is missing"):
        verify(case.records, case.packed, reporter=QUIET)


def test_a_finished_folder_on_a_read_only_file_system_is_nothing_to_do(case: PackingCase, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        histogram_path, plan_path = disk / "histogram.json", disk / "plan.json"
        settings = PackingSettings(shard_multiple=4)

        def run() -> list[bool]:
            counted = histogram(case.records, histogram_path, reporter=QUIET)
            planned = plan([histogram_path], plan_path, settings, reporter=QUIET)
            written = write(case.records, plan_path, disk / "packed", reporter=QUIET)
            proven = verify(case.records, disk / "packed", reporter=QUIET)
            return [counted.skipped, planned.skipped, written.skipped, proven.skipped]

        assert run() == [False] * 4
        make_read_only(disk)
        assert run() == [True] * 4
        assert not verify(case.records, disk / "packed", reporter=QUIET, overwrite=True).skipped
