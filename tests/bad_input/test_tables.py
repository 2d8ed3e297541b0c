"""Damaged tables: none ends the process, and what is accepted holds the values that a careful reader finds.

`make test` tries a few of each format, always the same; `make test-long` thousands.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tables.pack import pack_table
from tests.builders import tables
from tests.builders.damage import mutated
from tests.builders.effort import tries
from tests.builders.reporters import a_run
from tests.builders.watched_worker import WatchedWorker, command_in_process

pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)

SLOTS = 32
KINDS = ("arrow", "feather", "parquet", "jsonl")


def good_table(rng: random.Random, kind: str) -> bytes:
    rows = tables.random_rows(rng.choice([1, 3, 17]), 9, seed=rng.randrange(100))
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) + "\n" for row in rows).encode()
    table = pyarrow.Table.from_pylist(rows)
    if kind != "parquet" and rng.random() < 0.3:
        table = table.set_column(4, "name", table.column("name").dictionary_encode())
    if rng.random() < 0.3:
        table = table.set_column(0, "input_ids", table.column("input_ids").cast(pyarrow.large_list(pyarrow.int32())))
    if rng.random() < 0.3:
        table = table.append_column("meta", pyarrow.array([{"a": n, "b": [str(n)]} for n in range(table.num_rows)]))
    sink = io.BytesIO()
    if kind == "parquet":
        size, compression = rng.choice([2, 64]), rng.choice(["none", "snappy", "zstd"])
        others = {"use_dictionary": rng.random() < 0.5, "data_page_version": rng.choice(["1.0", "2.0"])}
        others["write_page_checksum"] = rng.random() < 0.2
        parquet.write_table(table, sink, row_group_size=size, compression=compression, **others)
        return sink.getvalue()
    options = pyarrow.ipc.IpcWriteOptions(compression=rng.choice([None, None, "lz4", "zstd"]))
    make = pyarrow.ipc.new_stream if kind == "arrow" else pyarrow.ipc.new_file
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice([2, 64]))
    return sink.getvalue()


def careful_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that a file holds, read whole and validated in full (lines of JSON by Python); it raises what it likes."""
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip(" \t\r")]
    if path.suffix == ".parquet" or data.startswith(b"PAR1"):
        table = parquet.read_table(io.BytesIO(data))
    elif data.startswith(b"ARROW1"):
        table = pyarrow.ipc.open_file(pyarrow.BufferReader(data)).read_all()
    else:
        table = pyarrow.ipc.open_stream(pyarrow.BufferReader(data)).read_all()
    table.validate(full=True)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def first_wrong_value(packed: Path, rows: list[dict[str, Any]]) -> str | None:
    """What a packed folder holds otherwise than the rows do; None where it holds every value of every row once."""
    seen: list[int] = []
    for path in sorted(packed.glob("packed-*.parquet")):
        for pack in parquet.read_table(path).to_pylist():
            at = 0
            for place, (index, size) in enumerate(zip(pack["indices"], pack["seq_lens"], strict=True)):
                seen.append(index)
                for name in set(pack) - {"indices", "seq_lens", "position_ids", "sequence_ids"}:
                    value = rows[index].get(name)
                    along = isinstance(value, list) and len(pack[name]) == SLOTS
                    held = pack[name][at : at + size] if along else pack[name][place]
                    if not _same(held, value):
                        return f"row {index}: {name} is {value!r}, packed is {held!r}"
                at += size
    return None if sorted(seen) == list(range(len(rows))) else f"of {len(rows)} rows there are {sorted(seen)}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_same(one.get(name), other.get(name)) for name in {*one, *other})
    return isinstance(one, bool) == isinstance(other, bool) and (one == other or repr(one) == repr(other))


COUNT, AT_ONCE = tries(10, 2000), 10


def packed_or_refused(kind: str, seed: int, folder: Path) -> str | None:
    """What is wrong with how one damaged table was taken; None where nothing is."""
    rng = random.Random(f"{kind} {seed}")
    path = folder / f"rows.{kind}"
    path.write_bytes(mutated(good_table(rng, kind), rng))
    command = ["pack", path.name, "--out", "packed", "--max-sequence-length", str(SLOTS), "--algorithm", "lpfhp", "--verify"]
    code, said = command_in_process(command, folder)
    if code == 2:
        one_line = said.splitlines()[-1:] == [line for line in said.splitlines() if line.startswith("error: ")]
        return None if one_line and not (folder / "packed").exists() else f"refused, but: {said}"
    return first_wrong_value(folder / "packed", careful_rows(path)) if code == 0 else f"pack ended with {code}: {said}"


@pytest.mark.repeated
@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_tables(worker: WatchedWorker, tmp_path: Path, kind: str, first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = worker.run(packed_or_refused, kind, seed, folder)
        assert outcome == ("ended", None), f"{kind} {seed}: {outcome}"
        shutil.rmtree(folder)


@pytest.mark.parametrize(("kind", "seed"), [("arrow", 10), ("arrow", 136), ("parquet", 40147)])
def test_damage_that_was_met_before(worker: WatchedWorker, tmp_path: Path, kind: str, seed: int) -> None:
    """Nulls in a dictionary; a column's name that is not UTF-8; a footer whose statistics do not go with its columns."""
    assert worker.run(packed_or_refused, kind, seed, tmp_path) == ("ended", None)


def read_packs(seed: int, packed: Path, folder: Path) -> str | None:
    """Read a damaged shard as PyTorch does; what comes is of the sizes that it must be."""
    import torch  # noqa: F401 - the room needs it

    from gaudi_bert.common.errors import InputError
    from gaudi_bert.pytorch import PackCollator, PackedDataset

    rng = random.Random(f"packed {seed}")
    shutil.copytree(packed, folder)
    for shard in sorted(folder.glob("*.parquet")):
        shard.write_bytes(mutated(shard.read_bytes(), rng))
    try:
        rows = list(PackedDataset(folder))
        for row in rows:
            PackCollator()([row])
    except InputError:
        return None
    return None if all(len(row["input_ids"]) == len(row["sequence_ids"]) for row in rows) else "unequal lengths"


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
    pack_table(source, out, TableSettings(max_sequence_length=8, shard_multiple=1), a_run(), verified=True)


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
    with pytest.raises(InputError, match=r"rows[.]arrow: cannot be read as a Parquet or Arrow table: .*; write it again"):
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
