"""Tables whose token ids have another name, and what takes tables: each gives what the same table gives with `input_ids`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
from pyarrow import parquet  # noqa: E402

from gaudi_bert.artefacts.shards import count_shards  # noqa: E402
from gaudi_bert.common.errors import InputError  # noqa: E402
from gaudi_bert.config.sections import TableSettings  # noqa: E402
from gaudi_bert.reporting.estimate import estimate  # noqa: E402
from gaudi_bert.tables.import_tables import import_tables  # noqa: E402
from gaudi_bert.tables.pack import pack_table  # noqa: E402
from gaudi_bert.tables.verify import verify_table  # noqa: E402
from tests.builders.command_line import run_command  # noqa: E402
from tests.builders.reporters import QUIET  # noqa: E402
from tests.builders.tables import random_rows  # noqa: E402

L = 64
ROWS = [row["input_ids"] for row in random_rows(310, L, seed=4)]


def write(folder: Path, name: str) -> Path:
    """The same rows in three formats' files: two of Parquet, one of JSON lines; with a scalar column."""
    folder.mkdir()
    for number, rows in enumerate((ROWS[:100], ROWS[100:170])):
        table = pyarrow.table({"weight": [0.5] * len(rows), name: rows})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=33)
    lines = (json.dumps({"weight": 0.5, name: row}) + "\n" for row in ROWS[170:])
    (folder / "2.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tables")
    return write(folder / "named", "tokens"), write(folder / "usual", "input_ids")


def test_packs_have_the_usual_name(tables, tmp_path: Path) -> None:
    named, usual = tables
    pack_table(named, tmp_path / "a", TableSettings(max_sequence_length=L, input_column="tokens"), reporter=QUIET)
    pack_table(usual, tmp_path / "b", TableSettings(max_sequence_length=L), reporter=QUIET)
    shards = sorted(path.name for path in (tmp_path / "b").glob("packed-*"))
    assert shards == ["packed-00000-00000.parquet"], "so few packs are one file"
    for name in shards:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert verify_table(named, tmp_path / "a", reporter=QUIET).content.sequences == len(ROWS)
    index = TableSettings(max_sequence_length=L, input_column="tokens", index_only=True)
    pack_table(named, tmp_path / "index", index, reporter=QUIET, verified=True)


def test_what_takes_a_table(tables, tmp_path: Path) -> None:
    named, usual = tables
    results = [
        estimate(source, depths=["max"], algorithms=["lpfhp"], reporter=QUIET, max_sequence_length=L, input_column=column)
        for source, column in ((named, "tokens"), (usual, "input_ids"))
    ]
    assert [result.sequences for result in results] == [len(ROWS)] * 2
    assert results[0].rows[0].packs == results[1].rows[0].packs
    assert results[0].tokens == sum(map(len, ROWS))
    longest = estimate(usual / "2.jsonl", depths=["max"], algorithms=["none"], reporter=QUIET)
    assert (longest.sequences, longest.max_sequence_length) == (140, max(map(len, ROWS[170:])))
    imported = [
        import_tables(source, tmp_path / column, reporter=QUIET, input_column=column).content
        for source, column in ((named, "tokens"), (usual, "input_ids"))
    ]
    assert imported[0] == imported[1]
    for path in (tmp_path / "tokens").glob("*.tfrecord"):
        assert path.read_bytes() == (tmp_path / "input_ids" / path.name).read_bytes()


def test_refused(tables, tmp_path: Path) -> None:
    named, _ = tables
    done = run_command("pack", named, "--out", tmp_path / "out", "--max-sequence-length", L)
    assert done.returncode == 2
    assert "has no column input_ids (it has weight, tokens); name the token ids with --input-column" in done.stderr
    both = tmp_path / "both.parquet"
    parquet.write_table(pyarrow.table({"tokens": [[1]], "input_ids": [[1]]}), both)
    settings = TableSettings(max_sequence_length=L, input_column="tokens")
    with pytest.raises(InputError, match="has both input_ids and tokens; rename it, or name the columns"):
        pack_table(both, tmp_path / "out", settings, reporter=QUIET)


@pytest.mark.parametrize(
    ("packs", "bytes_of_all", "shards"),
    [
        *((1, 1, 1), (151, 1, 1), (1024, 1, 1), (1025, 1, 2), (8712, 1, 16), (32_768, 1, 32), (10**6, 1, 32)),
        *((151, 301, 4), (151, 100 * 151, 160), (1000, 100 * 41, 64)),
    ],
)
def test_shards_of_small_tables(packs: int, bytes_of_all: int, shards: int) -> None:
    """A divisor of 32, or a multiple of it; never more than 100 bytes or 1,024 packs in one, where there are fewer."""
    actual = count_shards(packs, bytes_of_all, 32, 100, packs_of_a_shard=1024)
    assert actual == shards
    assert actual % 32 == 0 or 32 % actual == 0
