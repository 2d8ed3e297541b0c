"""The conservation proof: it holds for what write makes, and fails for every kind of loss, doubling or move."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.common.errors import FailedError
from gaudi_bert.tfrecords.verify import verify_records
from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
from gaudi_bert.tfrecords.wire.framing import frame, read_records
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.reporters import a_run
from tests.builders.shards import mend_sums, shards_of
from tests.oracles.wire import flipped

Packs = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(tmp_path_factory.mktemp("case"), files=4, sequences_per_file=30)


def mutate(case: PackingCase, out: Path, change: Callable[[Packs], None]) -> Path:
    """A copy of the packed folder with its first two large shards changed, and metadata that agrees with them."""
    shutil.copytree(case.packed, out)
    shards = sorted(shards_of(out), key=lambda shard: -shard.packs)[:2]
    rows = [[decode_example(payload) for payload in read_records(out / shard.name)] for shard in shards]
    packs = [row for part in rows for row in part]
    sizes = len(rows[0])
    change(packs)
    for shard, part in zip(shards, (packs[:sizes], packs[sizes:]), strict=True):
        data = b"".join(frame(encode_example(row)) for row in part)
        (out / shard.name).write_bytes(data)
    for group in range(len(RecordMetadata.read(out).shard_table.first_shards)):
        mend_sums(out, group)
    return out


def set_first(name: str, new: Callable[[Any], Any]) -> Callable[[Packs], None]:
    """Change the first value of a feature of the second pack."""

    def change(packs: Packs) -> None:
        packs[1][name][0] = new(packs[1][name][0])

    return change


def move_token_to_the_neighbour(packs: Packs) -> None:
    """The boundary between two sequences moves by one; every number in the pack agrees with it."""
    row = next(row for row in packs if np.any(row["input_mask"] == 2) and np.count_nonzero(row["input_mask"] == 1) > 1)
    start = int(row["next_sentence_positions"][1])
    length = int(np.count_nonzero(row["input_mask"] == 2)) + 1
    row["input_mask"][start - 1] = 2
    row["positions"][start - 1 : start - 1 + length] = np.arange(length)
    row["next_sentence_positions"][1] -= 1
    owners = row["masked_lm_positions"] == start - 1
    row["masked_lm_weights"][owners & (row["masked_lm_weights"] == 1)] = 2


MUTATIONS: dict[str, tuple[Callable[[Packs], object], str]] = {
    "pack dropped": (lambda packs: packs.pop(1), "missing"),
    "pack duplicated": (lambda packs: packs[1].update(packs[0]), "are missing.*duplicated"),
    "pack added": (lambda packs: packs.append(packs[0]), "duplicated"),
    "token changed": (set_first("input_ids", lambda value: value ^ 1), "missing"),
    "token moved to the neighbour": (move_token_to_the_neighbour, "missing"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_is_found_and_named(case: PackingCase, tmp_path: Path, name: str) -> None:
    change, reason = MUTATIONS[name]
    packed = mutate(case, tmp_path / "packed", change)
    (packed / "verification.json").write_text("{}")
    with pytest.raises(FailedError, match=reason) as caught:
        verify_records(case.records, packed, a_run())
    text = str(caught.value)
    assert "\n" not in text
    assert "part-" in text or "packed-" in text, "the file and the record are named"
    assert " record " in text
    assert not (packed / "verification.json").exists(), "an earlier proof is removed"


def without_first(data: bytes) -> bytes:
    """All records of a file but the first."""
    return data[int.from_bytes(data[:8], "little") + 16 :]


def rotated(data: bytes) -> bytes:
    rest = without_first(data)
    return rest + data[: -len(rest)]


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def copied(name: str, to: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / name, folder / to)


def removed(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


# Of group 1, whose shards begin with this one.
SHARD, INDEX = "packed/packed-00001-00000.tfrecord", "packed/group-00001.index"
DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (
        rewritten(SHARD, lambda data: flipped(data, 40)),
        f"{SHARD}: record 0 .* the record is damaged",
    ),
    (rewritten(SHARD, rotated), f"{SHARD}: the CRC-32C of the shard differs"),
    (removed(SHARD), f"{SHARD}: the shard is missing"),
    (copied(SHARD, "packed/packed-00009-00000.tfrecord"), r"packed-00009-00000.tfrecord: the file is not .*metadata\.json"),
    (copied(INDEX, "packed/group-00002.index"), r"group-00002.index: .*metadata\.json"),
    (
        rewritten(INDEX, lambda data: flipped(data, 5)),
        f"{INDEX}: the sizes and checksums in the index differ",
    ),
    (
        rewritten(INDEX, lambda data: data[4:8] + data[:4] + data[8:]),
        f"{INDEX}: the sizes and checksums in the index differ",
    ),
    (removed(INDEX), f"{INDEX}: the index is missing"),
    (rewritten("records/part-2", without_first), "1 sequences are duplicated, changed or not in the records"),
    (rewritten("records/part-2", rotated), "part-2 has changed since it was packed"),
    (removed("records/part-2"), "missing from the records: part-2"),
    (copied("records/part-2", "records/part-9"), "input file part-9 "),
]


@pytest.mark.parametrize(("change", "reason"), DAMAGE)
def test_damage_is_named(case: PackingCase, tmp_path: Path, change: Callable[[Path], object], reason: str) -> None:
    for folder in (case.records, case.packed):
        shutil.copytree(folder, tmp_path / folder.name)
    change(tmp_path)
    with pytest.raises(FailedError, match=reason):
        verify_records(tmp_path / "records", tmp_path / "packed", a_run())
