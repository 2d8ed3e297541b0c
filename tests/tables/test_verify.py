"""A packed table that was damaged, even where every stored sum agrees, is found out, and the position is named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

import pyarrow
from pyarrow import parquet

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.verify import verify_table
from tests.builders import tables
from tests.builders.folders import contents as local_contents
from tests.builders.reporters import a_run
from tests.builders.s3_server import S3Server, contents, quick, upload
from tests.builders.shards import mend_sums
from tests.oracles.wire import flipped

DAY_MS = 86_400_000
NOTES = Path("packed", NOTES_NAME)
SHARD = "packed-00000-00000.parquet"
Pack = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tables.write_parquet(folder / "rows.parquet", tables.random_rows(60, 30, seed=1))
    chosen = TableSettings(max_sequence_length=120, shard_multiple=2, algorithm="lpfhp", depth=5, too_long="split")
    pack_table(folder / "rows.parquet", folder / "packed", chosen, a_run(), verify=True)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def rewrite(packed: Path, change: Callable[[list[Pack]], None]) -> None:
    """Change the packs of the first shard, and mend the sums that are stored of it."""
    path = packed / SHARD
    schema, packs = parquet.read_schema(path), parquet.read_table(path).to_pylist()
    change(packs)
    parquet.write_table(pyarrow.Table.from_pylist(packs, schema), path)
    mend_sums(packed)


def refused(folder: Path, reason: str, error: Any = FailedError) -> None:
    with pytest.raises(error, match=reason):
        verify_table(folder / "rows.parquet", folder / "packed", a_run())


def set_value(column: str, position: int, value: Any) -> Callable[[list[Pack]], None]:
    def change(packs: list[Pack]) -> None:
        packs[0][column][position] = value

    return change


def swap_sequences(packs: list[Pack]) -> None:
    """The row numbers of two sequences of one length."""
    sizes = packs[0]["seq_lens"]
    one, other = next((a, b) for a in range(len(sizes)) for b in range(a) if sizes[a] == sizes[b])
    indices = packs[0]["indices"]
    indices[one], indices[other] = indices[other], indices[one]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_value("input_ids", 3, 1), r"pack 0: input_ids differs from row \d+"),
        (set_value("labels", 119, 0), r"pack 0: labels has a wrong value at slot 119"),
        (set_value("position_ids", 1, 0), r"pack 0: position_ids has a wrong value at slot 1"),
        (set_value("position_ids", 119, 77), r"pack 0: position_ids has a wrong value at slot 119"),
        (set_value("sequence_ids", 0, 2), r"pack 0: sequence_ids has a wrong value at slot 0"),
        (set_value("name", 0, "other"), r"name differs from the rows"),
        (set_value("score", 0, None), r"score differs from the rows"),
        (set_value("seq_lens", 0, 99), r"differs from the table|contains more than 120 tokens"),
        (set_value("indices", 0, 60), r"row 60 differs from the table"),
        (set_value("starts", 0, 1), r"row \d+ differs from the table"),
        (lambda packs: packs[1].update(packs[0]), "a sequence occurs in two packs"),
        (lambda packs: packs.pop(), r"no pack contains row \d+ of the table"),
        (swap_sequences, r"differs from row|differs from the rows"),
    ],
)
def test_damage_is_named(folder: Path, change: Callable[[list[Pack]], None], reason: str) -> None:
    rewrite(folder / "packed", change)
    refused(folder, reason)
    assert not (folder / NOTES / "verification.json").exists()


# Columns of five rows, in types that Parquet stores as others, and with NaN at any depth.
COLUMNS = {
    "date64": pyarrow.array([0, DAY_MS, None, 3 * DAY_MS, 5 * DAY_MS], pyarrow.date64()),
    "dictionary of NaN": pyarrow.array([math.nan, 8.0, None, math.nan, 9.0]).dictionary_encode(),
    "dictionary of long texts": pyarrow.array(["a", "b", None, "a", "c"], pyarrow.large_string()).dictionary_encode(),
    "half precision": pyarrow.array([math.nan, 1.0, None, 3.0, 5.0], pyarrow.float32()).cast(pyarrow.float16()),
    "structure": pyarrow.array(
        [{"a": math.nan, "b": [1.0, None]}, {"a": 0.5, "b": [math.nan]}, None, {"a": None}, {"b": []}]
    ),
    "structure of seconds": pyarrow.array(
        [{"a": 0}, {"a": 1}, None, {"a": None}, {"a": 5}], pyarrow.struct([("a", pyarrow.timestamp("s"))])
    ),
    "map": pyarrow.array(
        [[("k", math.nan)], [("k", 1.0), ("l", None)], None, [], [("k", 2.0)]],
        pyarrow.map_(pyarrow.string(), pyarrow.float64()),
    ),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_values_are_compared_in_the_type_that_parquet_stores(tmp_path: Path, column: str) -> None:
    table = pyarrow.table({"input_ids": [[1], [2, 3], [4], [5, 6], [7]], "x": COLUMNS[column]})
    tables.write_file(tmp_path / "rows.arrow", table)
    chosen = TableSettings(max_sequence_length=8, shard_multiple=1, algorithm="lpfhp")
    pack_table(tmp_path / "rows.arrow", tmp_path / "packed", chosen, a_run(), verify=True)
    for one, other in ((0, 1), (1, 2), (2, 3), (4, 0)):
        shutil.copytree(tmp_path / "packed", tmp_path / "changed")
        rewrite(tmp_path / "changed", partial(swap_values, one, other))
        with pytest.raises(FailedError, match="x differs from the rows"):
            verify_table(tmp_path / "rows.arrow", tmp_path / "changed", a_run())
        shutil.rmtree(tmp_path / "changed")


def swap_values(one: int, other: int, packs: list[Pack]) -> None:
    """The values of two rows in the column x."""
    of_row = {row: (pack["x"], at) for pack in packs for at, row in enumerate(pack["indices"])}
    (values, at), (others, there) = of_row[one], of_row[other]
    values[at], others[there] = others[there], values[at]


def test_damaged_and_missing_shards(folder: Path) -> None:
    path = folder / "packed" / SHARD
    path.write_bytes(flipped(path.read_bytes(), 100))
    refused(folder, rf"{SHARD}: the CRC-32C of the file differs")
    path.unlink()
    refused(folder, rf"{SHARD}: the shard is missing")


def exchange(packed: Path) -> None:
    for one, other in (("rows-9", "x"), ("rows-30", "rows-9"), ("x", "rows-30")):
        (packed / one).rename(packed / other)


def list_no_length(packed: Path) -> None:
    path = packed / NOTES_NAME / "row_lengths.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "row_lengths": []}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda packed: shutil.rmtree(packed / "rows-9"), "rows-9/.*/settings.json: cannot read: No such file"),
        (
            lambda packed: shutil.copytree(packed / "rows-9", packed / "rows-12"),
            "rows-12: the folder is not listed in .*row_lengths.json; remove",
        ),
        (lambda packed: (packed / "rows-9" / SHARD).unlink(), f"rows-9/{SHARD}: .*missing"),
        (lambda packed: rewrite(packed / "rows-9", set_value("input_ids", 0, 1)), r"input_ids differs from row \d+"),
        (lambda packed: rewrite(packed / "rows-30", lambda packs: packs.pop()), r"no pack contains row \d+ of the table"),
        (
            list_no_length,
            "row_lengths.json: .*`row_lengths` is .*, but must have a length of at least 1; pack the table again",
        ),
        (exchange, "rows-9/.*: settings.max_sequence_length: 30 in the file, 9 by .*; pack the table again"),
    ],
)
def test_damage_of_rows_of_several_lengths_is_named(tmp_path: Path, change: Callable[[Path], object], reason: str) -> None:
    tables.write_parquet(tmp_path / "rows.parquet", tables.random_rows(60, 30, seed=1))
    chosen = TableSettings(max_sequence_length=30, row_lengths=(9, 30), shard_multiple=2, algorithm="lpfhp", depth=5)
    pack_table(tmp_path / "rows.parquet", tmp_path / "packed", chosen, a_run(), verify=True)
    change(tmp_path / "packed")
    refused(tmp_path, reason, (FailedError, InputError))


def test_another_table_and_a_folder_that_is_not_finished_are_refused(folder: Path) -> None:
    tables.write_parquet(folder / "rows.parquet", tables.random_rows(60, 30, seed=2))
    refused(folder, r"input file rows\.parquet has changed since it was packed")
    (folder / NOTES / "metadata.json").unlink()
    refused(folder, "packing has not finished; run", InputError)


def test_a_bound_that_cannot_be_proven_is_refused_though_all_files_agree_on_it(tmp_path: Path) -> None:
    tables.write_lines(tmp_path / "rows.jsonl", [{"input_ids": [7] * 4}] * 12)
    packed = tmp_path / "packed"
    chosen = TableSettings(max_sequence_length=9, shard_multiple=1, algorithm="none", depth=2)
    pack_table(tmp_path / "rows.jsonl", packed, chosen, a_run(), verify=True)
    for name, changes in (("group-00000.json", {}), ("metadata.json", {"gap": 5})):
        stored = json.loads((packed / NOTES_NAME / name).read_text())
        (packed / NOTES_NAME / name).write_text(json.dumps({**stored, "lower_bound": 7, **changes}))
        mend_sums(packed)
    with pytest.raises(FailedError, match=r"group-00000[.]json: lower_bound is 7, .*6 packs"):
        verify_table(tmp_path / "rows.jsonl", packed, a_run())


def test_a_table_in_a_store_is_verified_at_once(whole: Path, s3: S3Server) -> None:
    part = a_run(part=(0, 2), store=quick(s3.endpoint))
    with pytest.raises(InputError, match=r"s3://bucket/packed: --shard is not supported .* at once"):
        verify_table(whole / "rows.parquet", Path("s3://bucket/packed"), part)


# --- from and to a bucket: the bytes of a folder, however the work is shared out or cut short


SETTINGS = TableSettings(max_sequence_length=61, shard_multiple=2, group_sequences=31)
SOURCE = "s3://bucket/tables/rows"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Path:
    """A folder with a table of three files, its packs, and the same table in the bucket."""
    folder = tmp_path_factory.mktemp("tables")
    (folder / "rows").mkdir()
    tables.write_parquet(folder / "rows" / "part-0.parquet", tables.random_rows(41, 61, seed=0))
    tables.write_file(folder / "rows" / "part-1.arrow", tables.random_rows(41, 61, seed=1))
    tables.write_lines(folder / "rows" / "part-2.jsonl", tables.random_rows(41, 61, seed=2))
    upload(folder / "rows", SOURCE, ObjectStore(quick(s3.endpoint)))
    pack_table(folder / "rows", folder / "packed", SETTINGS, a_run(), verify=True)
    return folder


def test_rows_of_several_lengths_from_and_to_a_bucket(local: Path, s3: S3Server, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"row_lengths": (16, 61)})
    pack_table(local / "rows", tmp_path / "packed", settings, a_run())
    out, store = Path("s3://bucket/tables/lengths"), quick(s3.endpoint)
    pack_table(SOURCE, out, settings, a_run(store=store))
    assert contents(str(out), ObjectStore(store)) == local_contents(tmp_path / "packed")
    proven = verify_table(SOURCE, out, a_run(store=store))
    assert {length: table.content.sequences for length, table in proven.tables.items()} == {16: 31, 61: 92}
    again = pack_table(SOURCE, out, settings, a_run(store=store))
    assert all(table.written.skipped for table in again.tables.values())


def test_a_row_at_fault_leaves_nothing_and_names_the_object(s3: S3Server, tmp_path: Path) -> None:
    objects = ObjectStore(quick(s3.endpoint))
    objects.write("s3://bucket/tables/bad.jsonl", b'{"input_ids": [1, 2]}\n{"input_ids": "no"}\n')
    out = Path("s3://bucket/tables/never")
    with pytest.raises(InputError, match=r"^s3://bucket/tables/bad.jsonl: "):
        pack_table("s3://bucket/tables/bad.jsonl", out, SETTINGS, a_run(store=objects.settings))
    assert contents("s3://bucket/tables/never", objects) == {}
    with pytest.raises(InputError, match=r"s3://bucket/tables/none.parquet: the bucket does not exist or"):
        pack_table("s3://bucket/tables/none.parquet", out, SETTINGS, a_run(store=objects.settings))
