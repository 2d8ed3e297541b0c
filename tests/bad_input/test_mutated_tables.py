"""Damaged tables: none ends the process, and what is accepted holds the values that a careful reader finds.

`make test` tries a few of each format, always the same; `make test-long` thousands.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.builders.effort import tries
from tests.builders.table_mutations import KINDS, SLOTS, careful_rows, first_wrong_value, good_table, mutated
from tests.builders.watched_worker import WatchedWorker, command_in_process

pytest.importorskip("pyarrow", exc_type=ImportError)

COUNT, AT_ONCE = tries(25, 2000), 25


def pack_and_import(kind: str, seed: int, folder: Path) -> str | None:
    """What is wrong with how one damaged table was taken; None where nothing is."""
    rng = random.Random(f"{kind} {seed}")
    path = folder / f"rows.{kind}"
    path.write_bytes(mutated(good_table(rng, kind), rng))
    code, said = command_in_process(["import", path.name, "--out", "imported"], folder)
    if code not in (0, 2) or (code == 2 and (folder / "imported").exists()):
        return f"import ended with {code}: {said}"
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
        outcome = worker.run(pack_and_import, kind, seed, folder)
        assert outcome == ("ended", None), f"{kind} {seed}: {outcome}"
        shutil.rmtree(folder)


@pytest.mark.parametrize(("kind", "seed"), [("arrow", 10), ("arrow", 136), ("parquet", 40147)])
def test_damage_that_was_met_before(worker: WatchedWorker, tmp_path: Path, kind: str, seed: int) -> None:
    """Nulls in a dictionary; a column's name that is not UTF-8; a footer whose statistics do not go with its columns."""
    assert worker.run(pack_and_import, kind, seed, tmp_path) == ("ended", None)


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
