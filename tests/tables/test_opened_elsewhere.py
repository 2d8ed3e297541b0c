"""Folders of tables open as one table in pyarrow and in Hugging Face datasets, verified or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)
from pyarrow import dataset, parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from gaudi_bert.artefacts.references import NOTES_NAME
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TableSettings, TokenizeSettings
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.tokenize import tokenize_texts
from tests.builders.reporters import QUIET


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Rows of tokens, of packs (one shard and several), and of an index."""
    folder = tmp_path_factory.mktemp("folders")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text("one two\ntwo one two\n" * 40)
    tokens = folder / "tokens"
    tokenize_texts(
        [str(folder / "text.txt")],
        folder / "tokenizer.json",
        tokens,
        TokenizeSettings(max_sequence_length=8, part_bytes=1000),
        reporter=QUIET,
    )
    created = {str(tokens): 80}
    for name, changes in (
        ("one shard", {}),
        ("groups", {"group_sequences": 7, "shard_multiple": 2}),
        ("index", {"index_only": True}),
    ):
        settings = TableSettings(max_sequence_length=13, algorithm="lpfhp", **changes)
        result = pack_table(tokens, folder / name, settings, reporter=QUIET, verified=name != "groups")
        created[str(folder / name)] = result.written.content.packs
    return created


def test_by_pyarrow(folders: dict[str, int]) -> None:
    for folder, rows in folders.items():
        assert parquet.read_table(folder).num_rows == rows
        assert dataset.dataset(folder).count_rows() == rows


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
    pack_table(tokens, out, small, reporter=QUIET, verified=True)
    with pytest.raises(InputError, match=r"out was written with --max-sequence-length 5, not"):
        pack_table(tokens, out, large, reporter=QUIET)
    (out / "packed-00099-00000.parquet").write_bytes(b"stale")
    pack_table(tokens, out, large, reporter=QUIET, overwrite=True)
    pack_table(tokens, tmp_path / "fresh", large, reporter=QUIET)
    assert _files(out) == _files(tmp_path / "fresh")
    for path in (out / NOTES_NAME).iterdir():
        path.unlink()
    (out / NOTES_NAME).rmdir()
    with pytest.raises(InputError, match=r"out: exists, but settings\.json does not describe it"):
        pack_table(tokens, out, large, reporter=QUIET)


def test_bad_rows_remove_the_folder(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1] * 9}) + "\n")
    with pytest.raises(InputError, match="has 9 tokens"):
        pack_table(tmp_path / "rows.jsonl", tmp_path / "out", TableSettings(max_sequence_length=8), reporter=QUIET)
    assert not (tmp_path / "out").exists()


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.name.startswith("."))
