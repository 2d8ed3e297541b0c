"""Tables of any format become packs of Parquet that hold every row exactly once, whatever the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow", exc_type=ImportError)

from pyarrow import dataset, parquet

from gaudi_bert.artefacts.packed import RowLengthTables
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.verify import verify_table
from tests.builders import tables
from tests.builders.folders import contents
from tests.builders.properties import examples
from tests.builders.reporters import a_run
from tests.builders.tables import settings
from tests.oracles.packed_table import check_packed_table, check_row_tables


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.parquet", tables.write_parquet),
        ("rows.arrow", tables.write_stream),
        ("rows.arrow", tables.write_file),
        ("rows.feather", tables.write_file),
        ("rows.jsonl", tables.write_lines),
        ("rows.jsonl.gz", tables.write_lines),
        ("saved", tables.write_dataset),
    ],
)
def test_every_row_is_there_once(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    rows = tables.random_rows(97, 61, seed=3)
    write(tmp_path / name, rows)
    result = pack_table(tmp_path / name, tmp_path / "packed", settings(group_sequences=31), a_run(), verify=True)
    check_packed_table(tmp_path / "packed", rows, 61)
    assert result.written.content.rows == result.written.content.sequences == 97
    assert result.verified is not None
    assert result.verified.content.sequences == 97
    assert sum(result.written.content.histogram) == 97


def test_parts_are_the_whole_in_any_sequence(tmp_path: Path) -> None:
    rows = tables.random_rows(150, 61, seed=8)
    (tmp_path / "rows").mkdir()
    tables.write_parquet(tmp_path / "rows" / "a.parquet", rows[:70])
    tables.write_parquet(tmp_path / "rows" / "b.parquet", rows[70:])
    chosen = settings(group_sequences=40)
    whole = pack_table(str(tmp_path / "rows" / "*.parquet"), tmp_path / "whole", chosen, a_run(workers=2))
    for part in (2, 0, 1):
        with pytest.raises(FailedError, match=r"\d of \d+ groups"):
            pack_table(tmp_path / "rows", tmp_path / "parts", chosen, a_run(finish=True))
        pack_table(tmp_path / "rows", tmp_path / "parts", chosen, a_run(workers=1, part=(part, 3)))
    pack_table(tmp_path / "rows", tmp_path / "parts", chosen, a_run(finish=True))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert len(whole.written.content.groups) == 5
    check_packed_table(tmp_path / "whole", rows, 61)
    assert all(max(group.packs) - min(group.packs) <= 1 for group in whole.written.content.groups)


@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
def test_rows_of_several_lengths(tmp_path: Path, policy: str) -> None:
    """Written at once or in parts; groups without a sequence of some length too."""
    rows = tables.random_rows(83, 150, seed=5)
    tables.write_stream(tmp_path / "rows.arrow", rows)
    chosen = settings(too_long=policy, group_sequences=7, row_lengths=(9, 40, 61))
    result = pack_table(tmp_path / "rows.arrow", tmp_path / "out", chosen, a_run(), verify=True)
    check_row_tables(tmp_path / "out", rows, (9, 40, 61), policy)
    assert [table.written.content.max_sequence_length for table in result.tables.values()] == [9, 40, 61]
    proven = verify_table(tmp_path / "rows.arrow", tmp_path / "out", a_run())
    assert sum(table.content.sequences for table in proven.tables.values()) == sum(
        table.written.content.sequences for table in result.tables.values()
    )
    for part in (1, 0):
        with pytest.raises(FailedError, match=r"\d of \d+ groups"):
            pack_table(tmp_path / "rows.arrow", tmp_path / "parts", chosen, a_run(finish=True))
        pack_table(tmp_path / "rows.arrow", tmp_path / "parts", chosen, a_run(part=(part, 2)))
    assert not RowLengthTables.json_path_in(tmp_path / "parts").exists()
    pack_table(tmp_path / "rows.arrow", tmp_path / "parts", chosen, a_run(finish=True))
    verify_table(tmp_path / "rows.arrow", tmp_path / "parts", a_run())
    assert contents(tmp_path / "parts") == contents(tmp_path / "out")
    with pytest.raises(InputError, match=r"row_lengths: \[9, 40, 61\] in the file, \[40, 61\] now"):
        other = settings(too_long=policy, group_sequences=7, row_lengths=(40, 61))
        pack_table(tmp_path / "rows.arrow", tmp_path / "out", other, a_run())
    pack_table(tmp_path / "rows.arrow", tmp_path / "out", settings(too_long=policy), a_run(overwrite=True))
    assert not list((tmp_path / "out").glob("rows-*"))


def test_lengths_of_rows_that_cost_least_and_one_where_several_gain_little(tmp_path: Path) -> None:
    sizes = [700] * 9 + [40] * 500
    tables.write_parquet(tmp_path / "rows.parquet", [{"input_ids": [7] * size} for size in sizes], row_group_size=100)
    auto = settings(row_lengths="auto", max_sequence_length=1000)
    several = pack_table(tmp_path / "rows.parquet", tmp_path / "several", auto, a_run())
    assert max(several.tables) == 704
    tables.write_parquet(tmp_path / "even.parquet", [{"input_ids": [7] * 64}] * 20)
    one = pack_table(tmp_path / "even.parquet", tmp_path / "one", auto, a_run())
    again = pack_table(tmp_path / "even.parquet", tmp_path / "one", settings(max_sequence_length=64), a_run())
    assert again.written == StageOutput(one.written.content, skipped=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """A packed table of several groups, verified, and its packs."""
    folder = tmp_path_factory.mktemp("folder")
    tables.write_parquet(folder / "rows.parquet", tables.random_rows(90, 61, seed=4))
    packed = pack_table(folder / "rows.parquet", folder / "packed", settings(group_sequences=30), a_run(), verify=True)
    return str(folder / "packed"), packed.written.content.packs


def test_pyarrow_opens_a_folder(folder: tuple[str, int]) -> None:
    packed, packs = folder
    assert parquet.read_table(packed).num_rows == dataset.dataset(packed).count_rows() == packs


def test_datasets_opens_a_folder(folder: tuple[str, int], tmp_path: Path) -> None:
    datasets, (packed, packs) = pytest.importorskip("datasets", exc_type=ImportError), folder
    for where in ({"path": packed}, {"path": "parquet", "data_dir": packed}):
        assert datasets.load_dataset(**where, cache_dir=str(tmp_path))["train"].num_rows == packs


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    slots=st.integers(1, 40),
    policy=st.sampled_from(["truncate", "split", "drop"]),
    depth=st.sampled_from(["max", 1, 3]),
    batch=st.sampled_from([1, 3, 64]),
    group=st.sampled_from([5, 500]),
)
@examples(20)
def test_any_rows_under_any_settings(tmp_path_factory, sizes, slots, policy, depth, batch, group) -> None:
    folder = tmp_path_factory.mktemp("any")
    rows = [{"input_ids": list(range(index, index + size)), "index": index} for index, size in enumerate(sizes)]
    tables.write_stream(folder / "rows.arrow", rows, batch)
    chosen = TableSettings(
        max_sequence_length=slots, too_long=policy, depth=depth, group_sequences=group, shard_multiple=1, algorithm="lpfhp"
    )
    if policy == "drop" and min(sizes) > slots:
        with pytest.raises(InputError, match="nothing to pack"):
            pack_table(folder / "rows.arrow", folder / "out", chosen, a_run())
        return
    result = pack_table(folder / "rows.arrow", folder / "out", chosen, a_run(), verify=True)
    packs = check_packed_table(folder / "out", rows, slots, policy)
    assert result.written.content.packs == len(packs)
    assert max(map(len, packs)) <= (slots if depth == "max" else depth)
    assert result.written.content.lower_bound <= len(packs)
