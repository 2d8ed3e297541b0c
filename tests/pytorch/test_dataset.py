"""Packs for PyTorch: the rows, the one order, a place that any number of processes and workers goes on from."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.reading.global_order import WINDOW_PACKS, find_input_region_of_shards
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from tests.builders.agree import identical
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.reporters import a_run
from tests.builders.shards import shards_of
from tests.builders.tables import random_rows, write_parquet
from tests.oracles.global_order import dealt_epoch

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")

from gaudi_bert.encoders.pack_inputs import PackInputs  # noqa: E402
from gaudi_bert.pytorch import PackCollator, PackedDataset, PackedLoader, model_inputs  # noqa: E402

SEED = 77


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def epochs(case: PackingCase) -> list[list[bytes]]:
    """The token ids of every pack of the first epochs, in the order of a dealer."""
    shards = shards_of(case.packed)
    packs = [
        [decode_example(each) for each in read_records(case.packed / shard.name)] if shard.packs else [] for shard in shards
    ]
    metadata = RecordMetadata.read(case.packed)
    regions = find_input_region_of_shards(
        metadata.shard_table.shards_per_group, metadata.input_files, metadata.seed
    ).tolist()
    return [
        [
            packs[shard][record]["input_ids"].astype(np.int32).tobytes()
            for shard, record in dealt_epoch([shard.packs for shard in shards], SEED, epoch, WINDOW_PACKS, regions=regions)
        ]
        for epoch in range(3)
    ]


def ids(rows) -> list[bytes]:
    return [np.asarray(row["input_ids"], np.int32).tobytes() for row in rows]


def batch_ids(rows: list[dict]) -> list[bytes]:
    """A collator for loaders whose batches are compared."""
    return ids(rows)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_loader_hands_out_the_same_batches_and_knows_its_place_with_any_number_of_workers(
    case, epochs, workers: int
) -> None:
    order, batch = epochs[0], 3
    whole = [order[first : first + batch] for first in range(0, len(order) - batch + 1, batch)]
    loader = PackedLoader(PackedDataset(case.packed, seed=SEED), batch, batch_ids, num_workers=workers)
    assert len(loader) == len(whole)
    assert list(itertools.islice(loader, 4)) == whole[:4]
    state = loader.state_dict()
    assert (state["epoch"], state["packs_done"]) == (0, 12)
    for processes in (2, 3):  # others go on, with another batch, twice
        read, done, states = {}, state["packs_done"], []
        for rank in range(processes):
            other = PackedLoader(PackedDataset(case.packed, rank, processes, SEED), 2, batch_ids, num_workers=workers)
            other.load_state_dict(state)
            first = done + (rank - done) % processes  # of the packs whose number is the rank's
            packs = list(itertools.chain.from_iterable(itertools.islice(other, 2) if processes == 2 else other))
            read |= {first + processes * number: pack for number, pack in enumerate(packs)}
            states.append(other.state_dict())
        assert all(each == states[0] for each in states)
        assert [read[number] for number in range(done, done + len(read))] == order[done : done + len(read)]
        state = states[0]
    assert (state["epoch"], state["packs_done"]) == (1, 0)
    assert len(order) - done - len(read) < 2 * processes


def test_an_epoch_ends_with_a_whole_update(case: PackingCase, epochs) -> None:
    dataset = PackedDataset(case.packed, seed=SEED)
    dataset.update_batches = 4
    loader = PackedLoader(dataset, 2, batch_ids)
    whole = len(epochs[0]) // 8 * 8
    assert list(itertools.chain.from_iterable(loader)) == epochs[0][:whole]
    assert dataset.dropped_packs == len(epochs[0]) - whole
    assert next(iter(loader)) == epochs[1][:2]


def test_a_rest_that_fills_no_batch_of_the_new_processes_is_left_out(case: PackingCase, epochs) -> None:
    dataset = PackedDataset(case.packed, 3, 8, SEED)
    dataset.load_state_dict(dataset.state_dict() | {"packs_done": len(epochs[0]) - 7})
    assert dataset.dropped_packs == len(epochs[0]) % 8
    loader = PackedLoader(dataset, 1, batch_ids, num_workers=2)
    assert next(iter(loader)) == [epochs[1][3]]
    assert loader.state_dict()["packs_done"] == 8


def test_what_cannot_work_is_refused_in_one_line(case: PackingCase, tmp_path: Path) -> None:
    dataset = PackedDataset(case.packed)
    (tmp_path / "packed-1.parquet").write_bytes(b"no table")
    refusals = {
        "rank = 2: .*0 to 1": lambda: PackedDataset(case.packed, 2, 2),
        "seed = 'a'": lambda: PackedDataset(case.packed, seed="a"),  # type: ignore[arg-type]
        "s3://bucket/packed": lambda: PackedDataset("s3://bucket/packed"),
        "batch_packs = 0": lambda: PackedDataset(case.packed, batch_packs=0),
        "epoch = -1": lambda: dataset.set_epoch(-1),
        "nothing: .*check the path": lambda: PackedDataset(tmp_path / "nothing"),
        f"{case.records}: .*`gaudi-bert pack`": lambda: PackedDataset(case.records),
        r"packed-1.parquet": lambda: PackedDataset(tmp_path),
        r"a batch of 999 on each of 1 ": lambda: PackedDataset(case.packed, batch_packs=999),
        r"1 batches of 999": lambda: PackedLoader(PackedDataset(case.packed), 999, batch_ids),
        "2 workers": lambda: next(iter(torch.utils.data.DataLoader(PackedDataset(case.packed), 2, num_workers=2))),
        "persistent_workers": lambda: PackedLoader(dataset, 2, batch_ids, num_workers=1, persistent_workers=True),
        "other packs": lambda: dataset.load_state_dict({"seed": 1}),
        "packs_done = 9999": lambda: dataset.load_state_dict(dataset.state_dict() | {"packs_done": 9999}),
        "order 3, .*order 4": lambda: dataset.load_state_dict(dataset.state_dict() | {"order": 3}),
    }
    for named, refused in refusals.items():
        with pytest.raises(InputError, match=named):
            refused()


# --- packs by their numbers are the folder's, in any order


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed table of several groups."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("tables")
    write_parquet(folder / "table.parquet", random_rows(230, 50, 1))
    settings = {"max_sequence_length": 32, "too_long": "split", "shard_multiple": 3, "group_sequences": 80}
    pack_table(folder / "table.parquet", folder / "packed", TableSettings(**settings), a_run())
    return folder / "packed"


def test_packed_tables_are_read_in_the_same_way(table: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = sorted(table.glob("packed-*.parquet"))
    rows = [parquet.read_table(path).to_pylist() for path in paths]
    windows = [parquet.ParquetFile(path).metadata.row_group(0).num_rows for path in paths]
    dataset = PackedDataset(table, seed=SEED)
    actual = list(dataset)
    for row, (file, number) in zip(actual, dealt_epoch(list(map(len, rows)), SEED, 0, windows), strict=True):
        assert {name: list(values) for name, values in row.items()} == rows[file][number]
    assert ids(actual) != ids(list(dataset))


def test_a_sampler_may_decide_the_order(table: Path) -> None:
    packs = PackedDataset(table).as_map()
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(
        packs, 4, shuffle=True, collate_fn=PackCollator(), num_workers=2, generator=generator
    )
    indices = [tuple(row[row != 0].tolist()) for batch in loader for row in batch["indices"]]
    in_order = [tuple(row["indices"][row["indices"] != 0].tolist()) for row in (packs[n] for n in range(len(packs)))]
    assert indices != in_order
    assert sorted(indices) == sorted(in_order)
    for number in (len(packs), -len(packs) - 1):
        with pytest.raises(IndexError, match=f"there are {len(packs)} packs"):
            packs[number]


@pytest.mark.parametrize("target", ["transformers-5", "flash"])
def test_columns_of_sequences_are_in_the_batch(table: Path, target: str) -> None:
    packs = PackedDataset(table).as_map()
    rows = sorted((packs[number] for number in range(len(packs))), key=lambda row: len(row["seq_lens"]))
    rows = [rows[0], rows[-1]]
    batch = PackCollator(target, PackInputs())(rows)
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
