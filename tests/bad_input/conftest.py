"""The watched process that all bad input goes to, and good input to make bad ones of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaudi_bert.config.sections import TableSettings
from tests.builders import tables
from tests.builders.bert_folder import good_folder
from tests.builders.packing_case import make_case
from tests.builders.reporters import a_run
from tests.builders.watched_worker import WatchedWorker


@pytest.fixture(scope="session")
def worker() -> Iterator[WatchedWorker]:
    watched = WatchedWorker()
    yield watched
    watched.stop()


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """records/, histogram.json, plan.json, packed/, rows.*, packed-table/, lengths.*, vocab.txt; a model/, task rows."""
    pytest.importorskip("pyarrow", exc_type=ImportError)
    from gaudi_bert.tables.pack import pack_table

    folder = tmp_path_factory.mktemp("good")
    make_case(folder, files=3, sequences_per_file=5)
    rows = tables.random_rows(31, 29, seed=4)
    tables.write_parquet(folder / "rows.parquet", rows)
    tables.write_stream(folder / "rows.arrow", rows)
    tables.write_lines(folder / "rows.jsonl", rows)
    settings = TableSettings(max_sequence_length=32, algorithm="lpfhp")
    pack_table(folder / "rows.parquet", folder / "packed-table", settings, a_run())
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(99))]) + "\n")
    good_folder(folder / "model")
    (folder / "texts.jsonl").write_text('{"text": "the cat sat"}\n{"text": "dogs runs"}\n')
    (folder / "texts.csv").write_text("a,b\n1,the cat sat\n2,dogs runs\n")
    (folder / "train.jsonl").write_text('{"text": "the cat", "label": 0}\n{"text": "dogs", "label": 1}\n')
    (folder / "labels.txt").write_text("cat\ndog\n")
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path) -> Path:
    """A copy of all that is good."""
    shutil.copytree(good, tmp_path / "place")
    return tmp_path / "place"
