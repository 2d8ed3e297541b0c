"""A packed table taken apart in plain Python: the contract of every pack is checked, and its sequences are returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALONG = ("input_ids", "labels", "loss_mask", "weights")
MADE = ("position_ids", "sequence_ids", "seq_lens", "indices", "starts")


def packs_of(folder: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return [row for path in sorted(folder.glob("packed-*.parquet")) for row in parquet.read_table(path).to_pylist()]


def sequences_of(pack: dict[str, Any], slots: int) -> list[dict[str, Any]]:
    """The sequences of a pack; asserts what the contract says of its slots."""
    along = [name for name in ALONG if name in pack]
    scalars = [name for name in pack if name not in (*along, *MADE)]
    found, at = [], 0
    for place, size in enumerate(pack["seq_lens"]):
        inside = slice(at, at + size)
        assert pack["position_ids"][inside] == list(range(size))
        assert pack["sequence_ids"][inside] == [place + 1] * size
        sequence = {name: pack[name][inside] for name in along} | {name: pack[name][place] for name in scalars}
        sequence["index"] = pack["indices"][place]
        sequence["start"] = pack["starts"][place] if "starts" in pack else 0
        found.append(sequence)
        at += size
    assert found
    assert at <= slots
    for name, padding in {"input_ids": 0, "labels": -100, "loss_mask": False, "weights": 0.0, "sequence_ids": 0}.items():
        if name in pack:
            assert len(pack[name]) == slots
            assert pack[name][at:] == [padding] * (slots - at)
    assert pack["position_ids"][at:] == list(range(slots - at))
    return found


def expected_sequences(rows: Sequence[dict[str, Any]], slots: int, policy: str) -> list[dict[str, Any]]:
    """What must be found, in the order of the rows."""
    wanted = []
    for index, row in enumerate(rows):
        size = len(row["input_ids"])
        starts = range(0, size, slots) if policy == "split" else [0]
        if size > slots and policy == "drop":
            continue
        for start in starts:
            sequence: dict[str, Any] = {"index": index, "start": start}
            for name, value in row.items():
                sequence[name] = value[start : start + slots] if name in ALONG else value
            wanted.append(sequence)
    return wanted


def check_row_tables(folder: Path, rows: Sequence[dict[str, Any]], lengths: Sequence[int], policy: str = "error") -> None:
    """Every row is there exactly once, in the shortest of the packs that it fits."""
    found, above = [], 0
    for length in lengths:
        packs = [sequences_of(pack, length) for pack in packs_of(folder / f"rows-{length}")]
        found += [sequence for pack in packs for sequence in pack]
        assert all(above < len(sequence["input_ids"]) <= length for pack in packs for sequence in pack)
        above = length
    assert sorted(found, key=lambda item: (item["index"], item["start"])) == expected_sequences(rows, lengths[-1], policy)


def check_packed_table(folder: Path, rows: Sequence[dict[str, Any]], slots: int, policy: str = "error") -> list[list[int]]:
    """Every row is there exactly once; the row numbers of each pack."""
    packs = [sequences_of(pack, slots) for pack in packs_of(folder)]
    found = sorted((sequence for pack in packs for sequence in pack), key=lambda item: (item["index"], item["start"]))
    assert found == expected_sequences(rows, slots, policy)
    assert max(Counter((item["index"], item["start"]) for item in found).values()) == 1
    return [[sequence["index"] for sequence in pack] for pack in packs]
