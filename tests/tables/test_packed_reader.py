"""Packs that are read by their numbers: a shard that is a copy of another is noticed."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

import numpy as np

from gaudi_bert.common.errors import InputError
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.packed_reader import open_packed_tables
from tests.builders import tables
from tests.builders.reporters import a_run
from tests.builders.tables import settings


@pytest.mark.parametrize("processes", [1, 3])
def test_a_shard_that_is_a_copy_of_another_is_noticed_when_it_was_read_once(tmp_path: Path, processes: int) -> None:
    """Each process reads a part of the packs of a row group, and so all row groups."""
    rows = [{"input_ids": [number] * 8} for number in range(1, 241)]
    tables.write_parquet(tmp_path / "rows.parquet", rows)
    out = tmp_path / "out"
    pack_table(tmp_path / "rows.parquet", out, settings(max_sequence_length=8, shard_multiple=2, shard_bytes=2000), a_run())
    paths = sorted(out.glob("*.parquet"))

    def read(rank: int) -> None:
        stored = open_packed_tables(out, paths)
        order = stored.make_order(seed=1)
        reader = stored.open_reader(order, rank, processes)
        numbers = np.arange(rank, order.packs, processes)
        for first in range(0, len(numbers), 5):
            stored.files.read_records(*reader.locate_and_open(0, numbers[first : first + 5]))

    for rank in range(processes):
        read(rank)
    sizes = [path.stat().st_size for path in paths]
    (one, other), *_ = [(a, b) for a, b in itertools.combinations(range(len(paths)), 2) if sizes[a] == sizes[b]]
    shutil.copyfile(paths[one], paths[other])
    for rank in range(processes):
        with pytest.raises(InputError, match=f"{paths[other].name}: the CRC-32C of the file differs from the manifest"):
            read(rank)
