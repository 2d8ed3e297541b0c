"""Hundreds of shards and tables (thousands in the long form) with an eighth of the descriptors that a process has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gaudi_bert.common.progress import Reporter
from gaudi_bert.records.packed_folder import read_metadata
from gaudi_bert.records.tables.packed_parquet import write_packed_parquet
from tests.builders.effort import tries
from tests.builders.many_shards import write_many_shards
from tests.builders.packing_case import make_case
from tests.builders.reading_process import read_in_a_process

pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")

SHARDS = tries(664, 2656)
MOST_OPEN = 100


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    return write_many_shards(folder / "packed", make_case(folder / "case").packed, SHARDS)


def test_packed_records(packed: Path) -> None:
    found = read_in_a_process("rows", packed, 128)
    assert found["packs"] == read_metadata(packed).packs
    assert 16 < found["mapped"] <= MOST_OPEN
    assert found["opened"] <= MOST_OPEN


def test_packed_tables(packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    few = write_many_shards(tmp_path / "few", make_case(tmp_path / "case").packed, 3)
    write_packed_parquet(few, tmp_path / "few-tables", reporter=Reporter(quiet=True))
    (tmp_path / "tables").mkdir()
    for number in range(SHARDS):
        shutil.copyfile(
            tmp_path / "few-tables" / f"packed-00000-{number % 3:05d}.parquet",
            tmp_path / "tables" / f"packed-00000-{number:05d}.parquet",
        )
    found = read_in_a_process("rows", tmp_path / "tables", 128)
    assert found["packs"] == read_metadata(packed).packs
    assert found["opened"] <= MOST_OPEN
