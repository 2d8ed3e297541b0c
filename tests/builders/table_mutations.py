"""Seeded damage to small tables of every format, and what a reader that trusts nothing makes of them."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.builders import tables

SLOTS = 32
KINDS = ("arrow", "feather", "parquet", "jsonl")
_WORDS = [0, 1, -1, 2, 7, 127, 128, 255, 2**15, 2**16, 2**30, 2**31 - 1, -(2**31), 395]


def good_table(rng: random.Random, kind: str) -> bytes:
    """A small table in one of the forms that a format has."""
    import pyarrow
    from pyarrow import parquet

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
        parquet.write_table(
            table,
            sink,
            row_group_size=rng.choice([2, 64]),
            compression=rng.choice(["none", "snappy", "zstd"]),
            use_dictionary=rng.random() < 0.5,
            data_page_version=rng.choice(["1.0", "2.0"]),
            write_page_checksum=rng.random() < 0.2,
        )
        return sink.getvalue()
    options = pyarrow.ipc.IpcWriteOptions(compression=rng.choice([None, None, "lz4", "zstd"]))
    make = pyarrow.ipc.new_stream if kind == "arrow" else pyarrow.ipc.new_file
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice([2, 64]))
    return sink.getvalue()


def _flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def _lose(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice([1, 4, 8, 64])]


def _insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.choice([rng.randbytes(rng.randint(1, 16)), bytes(8), data[at : at + rng.randint(1, 64)]])


def _word(rng: random.Random, data: bytearray) -> None:
    """An offset, a length or a value that lies: where words stand, in steps of four."""
    for _ in range(rng.choice([1, 1, 3])):
        at = 4 * rng.randrange(max(1, len(data) // 4))
        wide = rng.random() < 0.3
        data[at : at + (8 if wide else 4)] = struct.pack("<q" if wide else "<i", rng.choice(_WORDS))


def _token(rng: random.Random, data: bytearray) -> None:
    """What JSON is made of, at any place."""
    at = rng.randrange(len(data))
    tokens = [
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"\\",
        b"\n",
        b"null",
        b"true",
        b"1e999",
        b"-",
        b"9" * 30,
        b"[" * 99,
        b"\\ud800",
        b"\xff",
        b"\0",
    ]
    data[at : at + rng.randint(0, 3)] = rng.choice(tokens)


MUTATIONS: tuple[Callable[[random.Random, bytearray], None], ...] = (_flip, _cut, _lose, _insert, _word, _word, _token)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with one or two faults."""
    damaged = bytearray(data)
    for _ in range(rng.choice([1, 1, 2])):
        if damaged:
            rng.choice(MUTATIONS)(rng, damaged)
    return bytes(damaged)


def careful_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that a file holds, read whole and validated in full (lines of JSON by Python); it raises what it likes."""
    import pyarrow
    from pyarrow import parquet

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
    from pyarrow import parquet

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
