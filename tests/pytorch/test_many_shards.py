"""Hundreds of shards and tables (thousands in the long form) with an eighth of the descriptors that a process has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.tables.packed_parquet import PARQUET_PACKS
from gaudi_bert.tfrecords.convert import convert
from gaudi_bert.tfrecords.packed_folder import read_metadata
from tests.builders.effort import tries
from tests.builders.packing_case import make_case
from tests.builders.shards import read_in_a_process, write_many_shards

pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")

SHARDS = tries(664, 2656)
MOST_OPEN = 100


@pytest.mark.repeated
def test_packed_records_and_packed_tables(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    case = make_case(tmp_path / "case").packed
    packed = write_many_shards(tmp_path / "packed", case, SHARDS)
    few = write_many_shards(tmp_path / "few", case, 3)
    convert(few, tmp_path / "few-tables", PARQUET_PACKS, reporter=Reporter(quiet=True))
    (tmp_path / "tables").mkdir()
    for number in range(SHARDS):
        shutil.copyfile(
            tmp_path / "few-tables" / f"packed-00000-{number % 3:05d}.parquet",
            tmp_path / "tables" / f"packed-00000-{number:05d}.parquet",
        )
    records, tables = read_in_a_process("rows", 128, packed, tmp_path / "tables")
    assert records["packs"] == tables["packs"] == read_metadata(packed).packs
    assert 16 < records["mapped"] <= MOST_OPEN
    assert max(records["opened"], tables["opened"]) <= MOST_OPEN
