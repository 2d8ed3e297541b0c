"""Records and rows to batches: nothing lost, the same order every time, resumed anywhere; bad input in one line."""

from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.input.batches import TrainingOrder, evaluation_batches, training_batches, value_limits
from gaudi_bert.training.input.source import open_source
from tests.builders import training_data as data
from tests.builders.effort import tries

CONFIG = BertConfig(
    vocab_size=data.VOCABULARY,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    max_position_embeddings=data.LENGTH,
)


def limits(source):
    return value_limits(source, CONFIG)


def rows(batches) -> list[bytes]:
    """Every pack of the batches, as bytes."""
    return [ids.tobytes() for batch in batches for ids in batch["input_ids"]]


def train_rows(folder: Path, batch_packs: int, batches: int, **order) -> list[bytes]:
    source = open_source(folder)
    order = TrainingOrder(**{"seed": 1, "shuffle_packs": 5, **order})
    return rows(islice(training_batches(source, limits(source), batch_packs, order), batches))


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return data.write_packed(tmp_path_factory.mktemp("packed") / "train", data.make_packs(29))


def test_an_epoch_holds_every_pack_once_and_epochs_join_without_a_gap_in_an_order_of_the_seed_alone(packed) -> None:
    expected = sorted(row["input_ids"].astype(np.int32).tobytes() for row in data.packed_features(data.make_packs(29)))
    read = train_rows(packed, batch_packs=2, batches=29)
    assert sorted(read[:29]) == sorted(read[29:]) == expected
    assert read[:29] != read[29:]
    assert train_rows(packed, batch_packs=2, batches=29) == read != train_rows(packed, batch_packs=2, batches=29, seed=2)


@pytest.mark.repeated
def test_random_schedules_of_stops_and_other_world_sizes_read_the_one_order(packed) -> None:
    """Each stretch of a schedule is read by another number of processes, from where the last one ended."""
    source, random = open_source(packed), np.random.default_rng(5)
    alone = train_rows(packed, batch_packs=1, batches=150)
    for _ in range(tries(20, 1000)):
        done = 0
        for _ in range(random.integers(1, 4)):
            size, batch_packs, batches = int(random.choice([1, 2, 3, 4, 8])), int(random.integers(1, 4)), 2
            read = {}
            for rank in range(size):
                stretch = training_batches(source, limits(source), batch_packs, TrainingOrder(1, 5, rank, size, done))
                numbers = range(done + (rank - done) % size, done + batches * batch_packs * size, size)
                read.update(zip(numbers, rows(islice(stretch, batches)), strict=True))
            end = done + batches * batch_packs * size
            assert [read[number] for number in range(done, end)] == alone[done:end]
            done = end


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_unpacked_records_are_packs_of_one_sequence(tmp_path, compression) -> None:
    packs = data.make_packs(9)
    source = open_source(data.write_unpacked(tmp_path / "train", packs, compression=compression))
    assert (source.is_packed, source.depth, source.packing_factor) == (False, 1, 1.0)
    order = TrainingOrder(seed=1, shuffle_packs=3, packs_done=1)
    batch = next(training_batches(source, limits(source), 2, order))
    assert batch["next_sentence_weights"].tolist() == [[1], [1]]
    assert batch["positions"].max() == batch["input_mask"].sum(axis=1).max() - 1


def test_an_empty_gzip_is_a_file_of_no_records(tmp_path) -> None:
    folder = data.write_unpacked(tmp_path / "train", data.make_packs(9), compression="GZIP")
    (folder / "part-00001").write_bytes(gzip.compress(b""))
    source = open_source(folder)
    assert len(next(training_batches(source, limits(source), 2, TrainingOrder(1, 3, rank=1, size=2)))["input_ids"]) == 2
    assert source.count_packs(5) == 5
    (folder / "part-00000").write_bytes(gzip.compress(b""))
    with pytest.raises(InputError, match="no records in it"):
        next(training_batches(source, limits(source), 2, TrainingOrder(1, 3)))


def test_evaluation_reads_every_pack_once_and_fills_the_last_batch(packed) -> None:
    source = open_source(packed)
    batches = list(evaluation_batches(source, limits(source), 8))
    assert [batch["input_ids"].shape for batch in batches] == [(8, data.LENGTH)] * 4
    assert batches[-1]["next_sentence_weights"][5:].sum() == 0
    assert batches[-1]["masked_lm_weights"][5:].sum() == 0
    sequences = sum(int(batch["next_sentence_weights"].sum()) for batch in batches)
    assert sequences == sum(len(pack) for pack in data.make_packs(29))
    shares = [rows(evaluation_batches(source, limits(source), 8, rank, 3)) for rank in range(3)]
    assert sorted(row for share in shares for row in share) == sorted(rows(batches))
    assert len(rows(evaluation_batches(source, limits(source), 8, take_packs=3))) == 8
