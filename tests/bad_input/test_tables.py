"""Damaged tables: none ends the process, and what is accepted holds the values that a careful reader finds.

`make test` tries a few of each format, always the same; `make test-long` thousands.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.pack import pack_table
from tests.builders import tables
from tests.builders.effort import tries
from tests.builders.reporters import a_run
from tests.builders.watched_worker import WatchedWorker, command_in_process

pytest.importorskip("pyarrow", exc_type=ImportError)

from tools.fuzz_tables import KINDS, problems, read_packs

COUNT, AT_ONCE = tries(10, 2000), 10


@pytest.mark.repeated
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_tables(worker: WatchedWorker, tmp_path: Path, kind: str, first: int) -> None:
    assert list(problems(worker, kind, range(first, first + AT_ONCE), tmp_path)) == []


@pytest.mark.parametrize(("kind", "seed"), [("arrow", 10), ("arrow", 136), ("parquet", 40147)])
def test_damage_that_was_met_before(worker: WatchedWorker, tmp_path: Path, kind: str, seed: int) -> None:
    """Nulls in a dictionary; a column's name that is not UTF-8; a footer whose statistics do not go with its columns."""
    assert list(problems(worker, kind, [seed], tmp_path)) == []


@pytest.mark.repeated
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_damaged_packs_for_pytorch(worker: WatchedWorker, good: Path, tmp_path: Path, first: int) -> None:
    pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
    command = f"pack {good / 'rows.parquet'} --out {tmp_path / 'packed'} --max-sequence-length 32 --algorithm lpfhp"
    assert worker.run(command_in_process, command.split(), tmp_path).value[0] == 0
    for seed in range(first, first + AT_ONCE):
        folder = tmp_path / str(seed)
        outcome = worker.run(read_packs, seed, tmp_path / "packed", folder)
        assert outcome == ("ended", None), f"{seed}: {outcome}"
        shutil.rmtree(folder)


# --- no byte of foreign memory is packed


ROWS = [
    {"input_ids": [11, 12, 13], "labels": [21, 22, 23], "name": "abcde"},
    {"input_ids": [14], "labels": [24], "name": "fg"},
]
TEXT_OFFSETS, LIST_OFFSETS = (0, 5, 7), (0, 3, 4)


def damage(path: Path, offsets: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Put other int32 offsets where these are."""
    before, after = (np.array(values, np.int32).tobytes() for values in (offsets, other))
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))


def packed(source: Path, out: Path) -> None:
    pack_table(source, out, TableSettings(max_sequence_length=8, shard_multiple=1), a_run(), verify=True)


@pytest.mark.parametrize("write", [tables.write_file, tables.write_stream])
@pytest.mark.parametrize(
    ("offsets", "other"),
    [
        (TEXT_OFFSETS, (0, 5, 395)),
        (TEXT_OFFSETS, (0, 2**30, 7)),
        (TEXT_OFFSETS, (-400, 5, 7)),
        (LIST_OFFSETS, (0, 3, 2**30)),
        (LIST_OFFSETS, (0, -3, 4)),
    ],
)
def test_offsets_that_lead_out_of_the_file(
    tmp_path: Path, write: Callable[..., None], offsets: tuple[int, ...], other: tuple[int, ...]
) -> None:
    write(tmp_path / "rows.arrow", ROWS)
    damage(tmp_path / "rows.arrow", offsets, other)
    with pytest.raises(
        InputError, match=r"rows[.]arrow: the file cannot be read as a Parquet or Arrow .*create the file again"
    ):
        packed(tmp_path / "rows.arrow", tmp_path / "out")
    assert not list(tmp_path.glob("out/*.*"))


@pytest.mark.parametrize("name", ["rows.arrow", "rows.parquet"])
@pytest.mark.parametrize(
    ("text", "other", "said"),
    [
        (b"a_long_name", b"a_\xff\xfeng_name", "cannot be read as a Parquet or Arrow table"),
        (b"abcde", b"ab\xffde", "Invalid UTF8"),
    ],
)
def test_names_of_columns_and_texts_that_are_not_utf_8(
    tmp_path: Path, name: str, text: bytes, other: bytes, said: str
) -> None:
    rows = [{**row, "a_long_name": 7} for row in ROWS]
    (tables.write_parquet if name.endswith("parquet") else tables.write_stream)(tmp_path / name, rows)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(text, other))
    with pytest.raises(InputError, match=said):
        packed(tmp_path / name, tmp_path / "out")
    assert not list(tmp_path.glob("out/*.*"))
