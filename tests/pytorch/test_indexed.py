"""An index with its table gives what the packed table gives; packs by their numbers are the folder's, in any order."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
from pyarrow import parquet  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from gaudi_bert.artefacts.references import NOTES_NAME  # noqa: E402
from gaudi_bert.common.errors import InputError  # noqa: E402
from gaudi_bert.config.sections import TableSettings  # noqa: E402
from gaudi_bert.pytorch import PackCollator, PackedDataset, model_inputs  # noqa: E402
from gaudi_bert.pytorch.feeding import Feeding  # noqa: E402
from gaudi_bert.tables.pack import pack_table  # noqa: E402
from tests.builders.agree import identical  # noqa: E402
from tests.builders.reporters import QUIET  # noqa: E402

L = 32


def write_table(folder: Path, added: int = 0) -> Path:
    """Two files of Parquet and one of Arrow, whose tokens have another name; `added` to every token."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    tokens = [random.integers(1, 99, size) for size in random.integers(1, 50, 230)]
    for name, rows in (("a.parquet", range(90)), ("b.parquet", range(90, 140)), ("c.arrow", range(140, 230))):
        columns = {
            "tokens": [tokens[row] + added for row in rows],
            "labels": [tokens[row] + 1 for row in rows],
            "score": [row / 8 for row in rows],
            "name": [f"row {row}" for row in rows],
        }
        table = pyarrow.table(columns)
        if name.endswith(".parquet"):
            parquet.write_table(table, folder / name, row_group_size=37)
        else:
            with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=25)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The table, its packs, and its index."""
    folder = tmp_path_factory.mktemp("indexed")
    table = write_table(folder / "table")
    settings = {"max_sequence_length": L, "too_long": "split", "input_column": "tokens", "shard_multiple": 3}
    for name, index_only in (("packed", False), ("index", True)):
        pack_table(
            table, folder / name, TableSettings(**settings, index_only=index_only, group_sequences=80), reporter=QUIET
        )
    return table, folder / "packed", folder / "index"


def same(one, other) -> None:
    assert set(one) - {"starts"} == set(other) - {"starts"}
    for name in one:
        if name != "starts":
            np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), err_msg=name)


def test_an_index_with_its_table_gives_the_packed_rows(folders) -> None:
    table, packed, index = folders
    rows = PackedDataset(packed).as_map()
    indexed = PackedDataset(index, table=table)
    by_number = indexed.as_map()
    assert len(rows) == len(by_number) == indexed.packs > 50
    for number in range(len(rows)):
        same(rows[number], by_number[number])
    seen = sorted(tuple(row["indices"]) for row in indexed)
    assert seen == sorted(tuple(row["indices"]) for row in rows)
    again = pickle.loads(pickle.dumps(by_number))
    same(again[-1], rows[len(rows) - 1])
    state = indexed.state_dict()
    indexed.load_state_dict(state)


def test_a_sampler_may_decide_the_order(folders) -> None:
    _, packed, _ = folders
    packs = PackedDataset(packed).as_map()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(packs, 4, shuffle=True, collate_fn=PackCollator(), num_workers=2, generator=generator)
    batches = list(loader)
    indices = [tuple(row[row != 0].tolist()) for batch in batches for row in batch["indices"]]
    in_order = [tuple(row["indices"][row["indices"] != 0].tolist()) for row in (packs[n] for n in range(len(packs)))]
    assert indices != in_order
    assert sorted(indices) == sorted(in_order)
    for number in (len(packs), -len(packs) - 1):
        with pytest.raises(IndexError, match=f"there are {len(packs)} packs"):
            packs[number]


@pytest.mark.parametrize("target", ["transformers-5", "flash"])
def test_columns_of_sequences_are_in_the_batch(folders, target: str) -> None:
    _, packed, _ = folders
    packs = PackedDataset(packed).as_map()
    rows = sorted((packs[number] for number in range(len(packs))), key=lambda row: len(row["seq_lens"]))
    rows = [rows[0], rows[-1]]
    batch = PackCollator(target, Feeding())(rows)
    given = [row["score"].tolist() for row in rows]
    names = [list(row["name"]) for row in rows]
    if target == "flash":
        given, names = [[*given[0], *given[1]]], [[*names[0], *names[1]]]
    most = max(map(len, given))
    identical(batch["score"].numpy(), np.array([each + [0.0] * (most - len(each)) for each in given]))
    assert batch["name"] == names
    assert batch["indices"].dtype == torch.int64
    assert batch["indices"].shape == batch["seq_lens"].shape
    assert not {"score", "name", "indices", "starts"} & set(model_inputs(batch))


@pytest.mark.parametrize("content", ["[]", "null", "7", '"table"', "{}", '{"format": "table", "index_only": []}'])
def test_damaged_notes_are_refused_by_every_reader(folders, tmp_path: Path, content: str) -> None:
    table, packed, index = folders
    for number, (file, source, options) in enumerate(
        (
            ("metadata.json", packed, {}),
            ("metadata.json", index, {"table": table}),
            ("settings.json", index, {"table": table}),
        )
    ):
        copy = Path(shutil.copytree(source, tmp_path / str(number)))
        (copy / NOTES_NAME / file).write_text(content)
        with pytest.raises(InputError, match=file.replace(".", r"\.")):
            PackedDataset(copy, **options)


def test_refused(folders, tmp_path: Path) -> None:
    table, packed, index = folders
    with pytest.raises(InputError, match="packed: is not an index folder; omit table="):
        PackedDataset(packed, table=table)
    with pytest.raises(InputError, match=r"packed-00000-00000.parquet: is an index, which holds no tokens; pass its table"):
        PackedDataset(index)
    changed = write_table(tmp_path / "same", added=0)
    identical((changed / "c.arrow").read_bytes(), (table / "c.arrow").read_bytes())
    (write_table(tmp_path / "others", added=1) / "c.arrow").rename(changed / "c.arrow")
    assert (changed / "c.arrow").stat().st_size == (table / "c.arrow").stat().st_size
    with pytest.raises(InputError, match=r"c\.arrow: is not of the table that .*index indexes"):
        PackedDataset(index, table=changed)
    other = write_table(tmp_path / "table")
    (other / "a.parquet").unlink()
    with pytest.raises(InputError, match=r"table: 2 files, .*index indexes 3: a\.parquet, b\.parquet, c\.arrow; give all"):
        PackedDataset(index, table=other)
    parquet.write_table(pyarrow.table({"tokens": [[1]]}), other / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: is not of the table that .*index indexes"):
        PackedDataset(index, table=other)
