"""What a shard of a packed table holds: types, encodings, one scenario slot by slot. Packs are read by their numbers."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

import numpy as np
import pyarrow
from pyarrow import parquet

from gaudi_bert.common.errors import InputError
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.packed_files import open_packed_tables
from tests.builders import tables
from tests.builders.reporters import a_run
from tests.builders.tables import settings
from tests.oracles.packed_table import packs_of


def test_types_stay_as_they_were(tmp_path: Path) -> None:
    columns = {
        "input_ids": pyarrow.array([[1, 2], [3]], pyarrow.large_list(pyarrow.int16())),
        "labels": pyarrow.array([[1, -100], [3]], pyarrow.list_(pyarrow.int64())),
        "loss_mask": pyarrow.array([[True, False], [True]], pyarrow.list_(pyarrow.bool_())),
        "half": pyarrow.array([[0.5, 1.5], [2.5]], pyarrow.list_(pyarrow.float32())),
        "when": pyarrow.array([0, 1], pyarrow.timestamp("s")),
        "meta": pyarrow.array([{"a": 1}, {"a": None}]),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    pack_table(tmp_path / "rows.parquet", tmp_path / "out", settings(), a_run(), verify=True)
    schema = parquet.read_schema(tmp_path / "out" / "packed-00000-00000.parquet")
    for name in ("input_ids", "labels", "loss_mask", "half"):
        assert schema.field(name).type.value_type == columns[name].type.value_type
        assert schema.field(name).type.list_size == 61
    assert str(schema.field("meta").type.value_type) == "struct<a: int64>"
    (pack,) = packs_of(tmp_path / "out")
    assert [str(moment) for moment in pack["when"]] == [f"1970-01-01 00:00:0{index}" for index in pack["indices"]]


def test_numbers_of_tokens_are_stored_byte_by_byte(tmp_path: Path) -> None:
    """Integers and floats of one value a slot, whatever their width; truths and half floats cannot be."""
    kinds = {
        "input_ids": pyarrow.int32(),
        "labels": pyarrow.int64(),
        "token_type_ids": pyarrow.int8(),
        "weights": pyarrow.float32(),
        "chances": pyarrow.float64(),
        "halves": pyarrow.float16(),
        "loss_mask": pyarrow.bool_(),
    }
    columns = {name: pyarrow.array([[1, 0], [1]]).cast(pyarrow.list_(kind)) for name, kind in kinds.items()}
    tables.write_file(tmp_path / "rows.arrow", pyarrow.table({**columns, "name": ["a", "b"]}))
    pack_table(tmp_path / "rows.arrow", tmp_path / "out", settings(), a_run(), verify=True)
    group = parquet.ParquetFile(tmp_path / "out" / "packed-00000-00000.parquet").metadata.row_group(0)
    stored = {group.column(number).path_in_schema.split(".")[0]: group.column(number) for number in range(group.num_columns)}
    split = {name for name, chunk in stored.items() if "BYTE_STREAM_SPLIT" in chunk.encodings}
    assert split == {*kinds, "position_ids", "sequence_ids"} - {"halves", "loss_mask"}
    assert {name for name, chunk in stored.items() if chunk.statistics is None} == split
    assert not [name for name in ("seq_lens", "indices") if "DICTIONARY" in str(stored[name].encodings)]
    (pack,) = packs_of(tmp_path / "out")
    assert [pack[name][:3] for name in kinds] == [[1, 0, 1] if pack["indices"] == [0, 1] else [1, 1, 0]] * len(kinds)


def test_one_scenario_slot_by_slot(tmp_path: Path) -> None:
    first, second = {"input_ids": [7, 8, 9], "labels": [7, -100, 9]}, {"input_ids": [5, 6], "labels": [5, 6]}
    tables.write_lines(tmp_path / "rows.jsonl", [{**first, "name": "a"}, {**second, "name": "b"}])
    pack_table(tmp_path / "rows.jsonl", tmp_path / "out", settings(max_sequence_length=7), a_run())
    assert packs_of(tmp_path / "out") == [
        {
            "input_ids": [5, 6, 7, 8, 9, 0, 0],
            "labels": [5, 6, 7, -100, 9, -100, -100],
            "position_ids": [0, 1, 0, 1, 2, 0, 1],
            "sequence_ids": [1, 1, 2, 2, 2, 0, 0],
            "seq_lens": [2, 3],
            "indices": [1, 0],
            "name": ["b", "a"],
        }
    ]


def test_as_many_shards_are_written_as_the_bytes_of_the_packs_ask_for(tmp_path: Path) -> None:
    """100 packs of 61 ids of 4 bytes, weights of 8 bytes and truths: at most 18 packs fit into 16,000 bytes."""
    random = np.random.default_rng(1)
    columns = {
        "input_ids": pyarrow.array(random.integers(0, 2**31, (100, 61), np.int32).tolist(), pyarrow.list_(pyarrow.int32())),
        "weights": pyarrow.array(random.random((100, 61)).tolist(), pyarrow.list_(pyarrow.float64())),
        "loss_mask": pyarrow.array((random.random((100, 61)) < 0.5).tolist(), pyarrow.list_(pyarrow.bool_())),
    }
    tables.write_file(tmp_path / "rows.parquet", pyarrow.table(columns))
    pack_table(tmp_path / "rows.parquet", tmp_path / "out", settings(shard_bytes=16_000, shard_multiple=1), a_run())
    shards = sorted((tmp_path / "out").glob("*.parquet"))
    assert len(shards) == 6
    assert max(shard.stat().st_size for shard in shards) <= 16_000
    assert sum(parquet.ParquetFile(shard).metadata.num_rows for shard in shards) == 100


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
