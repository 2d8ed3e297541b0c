"""Pack damaged tables. No table may crash the process, and packs of an accepted table must hold the same values as an
independent reader finds.

    python -m tools.fuzz_tables KIND SEED COUNT FOLDER      KIND is one of `KINDS`; FOLDER is empty

Each table is packed in a watched process. Problems are printed, and if there are any, the exit code is 1.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from gaudi_bert.common.errors import InputError
from tests.builders import tables
from tests.builders.watched_worker import WatchedWorker, command_in_process
from tools.damage import mutated

SLOTS = 32
KINDS = ("arrow", "feather", "parquet", "jsonl")


def good_table(rng: random.Random, kind: str) -> bytes:
    """Return the bytes of a valid random table."""
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
    """Return the rows of a file, which is read completely and fully validated (JSON lines are parsed by Python). Any
    exception may be raised.
    """
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
    """Return the first difference between a packed folder and the rows, or None if the folder contains every value of every
    row exactly once.
    """
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


def packed_or_refused(kind: str, seed: int, folder: Path) -> str | None:
    """Pack one damaged table. Return a description of the problem, or None if the table was packed correctly or properly
    rejected.
    """
    rng = random.Random(f"{kind} {seed}")
    path = folder / f"rows.{kind}"
    path.write_bytes(mutated(good_table(rng, kind), rng))
    command = ["pack", path.name, "--out", "packed", "--max-sequence-length", str(SLOTS), "--algorithm", "lpfhp", "--verify"]
    code, said = command_in_process(command, folder)
    if code == 2:
        one_line = said.splitlines()[-1:] == [line for line in said.splitlines() if line.startswith("error: ")]
        return None if one_line and not (folder / "packed").exists() else f"refused, but: {said}"
    return first_wrong_value(folder / "packed", careful_rows(path)) if code == 0 else f"pack ended with {code}: {said}"


def read_packs(seed: int, packed: Path, folder: Path) -> str | None:
    """Read damaged packs with the PyTorch API. Return a description of the problem, or None if the sizes are right or the
    packs were rejected.
    """

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


def problems(worker: WatchedWorker, kind: str, seeds: Iterable[int], folder: Path) -> Iterator[str]:
    """Pack damaged tables of one kind, and yield a description of each problem."""
    for seed in seeds:
        (folder / str(seed)).mkdir()
        outcome = worker.run(packed_or_refused, kind, seed, folder / str(seed))
        if outcome != ("ended", None):
            yield f"{kind} {seed}: {outcome}"
        shutil.rmtree(folder / str(seed))


def main(kind: str, first: int, count: int, folder: Path) -> int:
    """Pack a number of damaged tables, and return the exit code."""
    found = list(problems(WatchedWorker(), kind, range(first, first + count), folder))
    print(*found, f"{count} packed or refused, {len(found)} wrong", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
