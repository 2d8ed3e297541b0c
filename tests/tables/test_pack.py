"""Tables of any format become packs of Parquet that hold every row exactly once, whatever the settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow", exc_type=ImportError)

from pyarrow import dataset, parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.artefacts.packed import RowTables
from gaudi_bert.artefacts.results import ByRowLength, PackResult, StageOutput
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import TableSettings, TokenizeSettings
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.sources import tokenized_length
from gaudi_bert.tables.tokenize import tokenize_texts
from gaudi_bert.tables.verify import verify_table
from gaudi_bert.tfrecords.packed_folder import read_metadata
from tests.builders import tables
from tests.builders.command_line import succeed
from tests.builders.folders import contents
from tests.builders.properties import examples
from tests.builders.reporters import a_run
from tests.oracles.packed_table import check_packed_table, check_row_tables, packs_of

SMALL = {"max_sequence_length": 61, "shard_multiple": 2, "algorithm": "lpfhp"}


def settings(**changes: Any) -> TableSettings:
    return TableSettings(**{**SMALL, **changes})


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
    result = pack_table(tmp_path / name, tmp_path / "packed", settings(group_sequences=31), a_run(), verified=True)
    check_packed_table(tmp_path / "packed", rows, 61)
    assert result.written.content.rows == result.written.content.sequences == 97
    assert result.verified is not None
    assert result.verified.content.sequences == 97
    assert sum(result.written.content.histogram) == 97


@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
def test_rows_that_are_too_long(tmp_path: Path, policy: str) -> None:
    rows = tables.random_rows(83, 150, seed=5)
    tables.write_stream(tmp_path / "rows.arrow", rows)
    chosen = settings(too_long=policy, group_sequences=30)
    result = pack_table(tmp_path / "rows.arrow", tmp_path / "out", chosen, a_run(), verified=True)
    check_packed_table(tmp_path / "out", rows, 61, policy)
    long = [len(row["input_ids"]) for row in rows if len(row["input_ids"]) > 61]
    effect = result.written.content.too_long
    assert effect.rows == len(long)
    assert effect.dropped_rows == (len(long) if policy == "drop" else 0)
    assert effect.dropped_tokens == {"truncate": sum(long) - 61 * len(long), "split": 0, "drop": sum(long)}[policy]
    assert effect.added_sequences == (sum(-(-size // 61) - 1 for size in long) if policy == "split" else 0)


def test_parts_are_the_whole_in_any_sequence(tmp_path: Path) -> None:
    rows = tables.random_rows(150, 61, seed=8)
    (tmp_path / "rows").mkdir()
    tables.write_parquet(tmp_path / "rows" / "a.parquet", rows[:70])
    tables.write_parquet(tmp_path / "rows" / "b.parquet", rows[70:])
    chosen = settings(group_sequences=40)
    whole = pack_table(str(tmp_path / "rows" / "*.parquet"), tmp_path / "whole", chosen, a_run(workers=2))
    for part in (2, 0, 1):
        with pytest.raises(FailedError, match="groups are not written"):
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
    result = pack_table(tmp_path / "rows.arrow", tmp_path / "out", chosen, a_run(), verified=True)
    check_row_tables(tmp_path / "out", rows, (9, 40, 61), policy)
    assert isinstance(result, ByRowLength)
    assert [table.written.content.max_sequence_length for table in result.tables.values()] == [9, 40, 61]
    proven = verify_table(tmp_path / "rows.arrow", tmp_path / "out", a_run())
    assert sum(table.content.sequences for table in proven.tables.values()) == sum(
        table.written.content.sequences for table in result.tables.values()
    )
    for part in (1, 0):
        with pytest.raises(FailedError, match="groups are not written"):
            pack_table(tmp_path / "rows.arrow", tmp_path / "parts", chosen, a_run(finish=True))
        pack_table(tmp_path / "rows.arrow", tmp_path / "parts", chosen, a_run(part=(part, 2)))
    assert not RowTables.path_in(tmp_path / "parts").exists()
    pack_table(tmp_path / "rows.arrow", tmp_path / "parts", chosen, a_run(finish=True))
    verify_table(tmp_path / "rows.arrow", tmp_path / "parts", a_run())
    assert contents(tmp_path / "parts") == contents(tmp_path / "out")
    with pytest.raises(InputError, match=r"row_lengths: \[9, 40, 61\] there, \[40, 61\] now"):
        other = settings(too_long=policy, group_sequences=7, row_lengths=(40, 61))
        pack_table(tmp_path / "rows.arrow", tmp_path / "out", other, a_run())
    pack_table(tmp_path / "rows.arrow", tmp_path / "out", settings(too_long=policy), a_run(overwrite=True))
    assert not list((tmp_path / "out").glob("rows-*"))


def test_lengths_of_rows_that_cost_least_and_one_where_several_gain_little(tmp_path: Path) -> None:
    sizes = [700] * 9 + [40] * 500
    tables.write_parquet(tmp_path / "rows.parquet", [{"input_ids": [7] * size} for size in sizes], row_group_size=100)
    auto = settings(row_lengths="auto", max_sequence_length=1000)
    several = pack_table(tmp_path / "rows.parquet", tmp_path / "several", auto, a_run())
    assert isinstance(several, ByRowLength)
    assert max(several.tables) == 704
    tables.write_parquet(tmp_path / "even.parquet", [{"input_ids": [7] * 64}] * 20)
    one = pack_table(tmp_path / "even.parquet", tmp_path / "one", auto, a_run())
    assert isinstance(one, PackResult)
    again = pack_table(tmp_path / "even.parquet", tmp_path / "one", settings(max_sequence_length=64), a_run())
    assert again.written == StageOutput(one.written.content, skipped=True)


def test_a_large_row_group_is_read_in_runs(tmp_path: Path) -> None:
    rows = tables.random_rows(101, 61, seed=9)
    tables.write_parquet(tmp_path / "rows.parquet", rows, row_group_size=1000)
    chosen = settings(group_sequences=30)
    result = pack_table(tmp_path / "rows.parquet", tmp_path / "out", chosen, a_run(), verified=True)
    assert len(result.written.content.groups) == 4
    check_packed_table(tmp_path / "out", rows, 61)


def test_a_second_run_does_nothing_and_other_settings_are_refused(tmp_path: Path) -> None:
    tables.write_parquet(tmp_path / "rows.parquet", tables.random_rows(20, 61, seed=10))
    first = pack_table(tmp_path / "rows.parquet", tmp_path / "out", settings(), a_run())
    before = contents(tmp_path / "out")
    again = pack_table(tmp_path / "rows.parquet", tmp_path / "out", settings(), a_run())
    assert again == PackResult(StageOutput(first.written.content, skipped=True))
    with pytest.raises(InputError, match=r"depth: .max. there, 2 now.*--overwrite"):
        pack_table(tmp_path / "rows.parquet", tmp_path / "out", settings(depth=2), a_run())
    assert contents(tmp_path / "out") == before
    with pytest.raises(InputError, match="holds a packed table, not packed TFRecords"):
        read_metadata(tmp_path / "out")


def test_only_chosen_columns_are_packed(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "tags": ["a", "b"], "labels": [1, 2], "name": "x"}]
    tables.write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError, match=r"column tags holds list<.*>; only lists of numbers are packed"):
        pack_table(tmp_path / "rows.jsonl", tmp_path / "out", settings(), a_run())
    pack_table(tmp_path / "rows.jsonl", tmp_path / "out", settings(columns=("labels",)), a_run(), verified=True)
    (pack,) = packs_of(tmp_path / "out")
    assert set(pack) == {"input_ids", "labels", "position_ids", "sequence_ids", "seq_lens", "indices"}


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
        with pytest.raises(InputError, match="no row remains"):
            pack_table(folder / "rows.arrow", folder / "out", chosen, a_run())
        return
    result = pack_table(folder / "rows.arrow", folder / "out", chosen, a_run(), verified=True)
    packs = check_packed_table(folder / "out", rows, slots, policy)
    assert result.written.content.packs == len(packs)
    assert max(map(len, packs)) <= (slots if depth == "max" else depth)
    assert result.written.content.lower_bound <= len(packs)


def test_what_can_only_be_read_at_once_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables.write_lines(tmp_path / "rows.jsonl.gz", tables.random_rows(90, 61, seed=12))
    pack_table(tmp_path / "rows.jsonl.gz", tmp_path / "out", settings(group_sequences=40), a_run(reporter=Reporter()))
    assert "90 rows, about" in capsys.readouterr().err


@pytest.mark.parametrize("write", [tables.write_parquet, tables.write_stream, tables.write_lines])
@pytest.mark.parametrize("token", [2**32 + 7, 2**40, -1, 2**31])
def test_numbers_that_would_wrap_are_named(tmp_path: Path, write: Callable[..., None], token: int) -> None:
    ending = {"write_parquet": "parquet", "write_stream": "arrow", "write_lines": "jsonl"}[write.__name__]
    write(tmp_path / f"rows.{ending}", [{"input_ids": [2, 3]}, {"input_ids": [2, token, 3]}])
    with pytest.raises(InputError, match=rf"rows.{ending}: row 1: input_ids holds {token}; token ids are 0 to 2147483647"):
        pack_table(tmp_path / f"rows.{ending}", tmp_path / "out", settings(), a_run())
    assert not (tmp_path / "out").exists()


# --- folders of tables open as one table in pyarrow and in Hugging Face datasets, verified or not


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Rows of tokens, and of packs (one shard and several)."""
    folder = tmp_path_factory.mktemp("folders")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text("one two\ntwo one two\n" * 40)
    tokens, chosen = folder / "tokens", TokenizeSettings(max_sequence_length=8, part_bytes=1000)
    tokenize_texts([str(folder / "text.txt")], folder / "tokenizer.json", tokens, chosen, a_run())
    created = {str(tokens): 80}
    for name, changes in (
        ("one shard", {}),
        ("groups", {"group_sequences": 7, "shard_multiple": 2}),
    ):
        chosen_table = TableSettings(max_sequence_length=13, algorithm="lpfhp", **changes)
        result = pack_table(tokens, folder / name, chosen_table, a_run(), verified=name != "groups")
        created[str(folder / name)] = result.written.content.packs
    return created


def test_by_pyarrow(folders: dict[str, int]) -> None:
    for folder, rows in folders.items():
        assert parquet.read_table(folder).num_rows == rows
        assert dataset.dataset(folder).count_rows() == rows


def test_rows_of_tokenize_bring_their_length(folders: dict[str, int], tmp_path: Path) -> None:
    tokens = next(iter(folders))
    assert tokenized_length(tokens) == 8
    packed = json.loads(succeed("pack", tokens, "--out", tmp_path / "packed", "--json").stdout)
    assert packed["max_sequence_length"] == 8
    assert tokenized_length(tmp_path / "packed") is None


def test_by_datasets(folders: dict[str, int], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    for number, (folder, rows) in enumerate(folders.items()):
        cache = str(tmp_path / str(number))
        assert datasets.load_dataset(folder, cache_dir=cache)["train"].num_rows == rows
        assert datasets.load_dataset("parquet", data_dir=folder, cache_dir=cache)["train"].num_rows == rows


def test_overwritten_with_other_settings(folders: dict[str, int], tmp_path: Path) -> None:
    """Nothing of the earlier content remains, and a folder without our notes is not touched."""
    tokens, out = next(iter(folders)), tmp_path / "out"
    small, large = (TableSettings(max_sequence_length=length, algorithm="lpfhp", group_sequences=9) for length in (5, 13))
    pack_table(tokens, out, small, a_run(), verified=True)
    with pytest.raises(InputError, match=r"max_sequence_length: 5 there"):
        pack_table(tokens, out, large, a_run())
    (out / "packed-00099-00000.parquet").write_bytes(b"stale")
    pack_table(tokens, out, large, a_run(overwrite=True))
    pack_table(tokens, tmp_path / "fresh", large, a_run())
    assert contents(out) == contents(tmp_path / "fresh")
    shutil.rmtree(out / NOTES_NAME)
    with pytest.raises(InputError, match=r"out: exists and is not ours"):
        pack_table(tokens, out, large, a_run())
