"""Records to batches: nothing lost, the same order every time, resumed anywhere; what is refused, in one line."""

from __future__ import annotations

import gzip
import re
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.batches import TrainingOrder, read_evaluation_batches, read_training_batches
from gaudi_bert.training.sources import check_records_fit_model, open_local_records
from tests.builders import training_data as data
from tests.builders.packing_case import make_case

CONFIG = BertConfig(**data.MODEL, vocab_size=data.VOCABULARY, max_position_embeddings=data.LENGTH)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return data.write_packed(tmp_path_factory.mktemp("packed") / "train", data.make_packs(29))


def rows(batches) -> list[bytes]:
    """Every pack of the batches, as bytes."""
    return [ids.tobytes() for batch in batches for ids in batch["input_ids"]]


def train_rows(folder: Path, batch_packs: int, batches: int, **order) -> list[bytes]:
    source = open_local_records(folder)
    order = TrainingOrder(**{"seed": 1, "shuffle_packs": 5, **order})
    return rows(islice(read_training_batches(source, CONFIG, batch_packs, order), batches))


def test_an_epoch_holds_every_pack_once_and_epochs_join_without_a_gap_in_an_order_of_the_seed_alone(packed) -> None:
    expected = sorted(row["input_ids"].astype(np.int32).tobytes() for row in data.packed_features(data.make_packs(29)))
    read = train_rows(packed, batch_packs=2, batches=29)
    assert sorted(read[:29]) == sorted(read[29:]) == expected
    assert read[:29] != read[29:]
    assert train_rows(packed, batch_packs=2, batches=29) == read != train_rows(packed, batch_packs=2, batches=29, seed=2)


def test_unpacked_records_are_packs_of_one_sequence(tmp_path) -> None:
    source = open_local_records(data.write_unpacked(tmp_path / "train", data.make_packs(9), compression="ZLIB"))
    assert (source.is_packed, source.depth, source.packing_factor) == (False, 1, 1.0)
    order = TrainingOrder(seed=1, shuffle_packs=3, packs_done=1)
    batch = next(read_training_batches(source, CONFIG, 2, order))
    assert batch["next_sentence_weights"].tolist() == [[1], [1]]
    assert batch["positions"].max() == batch["input_mask"].sum(axis=1).max() - 1


def test_an_empty_gzip_is_a_file_of_no_records(tmp_path) -> None:
    folder = data.write_unpacked(tmp_path / "train", data.make_packs(9), compression="GZIP")
    (folder / "part-00001").write_bytes(gzip.compress(b""))
    source = open_local_records(folder)
    assert len(next(read_training_batches(source, CONFIG, 2, TrainingOrder(1, 3, rank=1, size=2)))["input_ids"]) == 2
    assert source.count_packs_up_to(5) == 5
    (folder / "part-00000").write_bytes(gzip.compress(b""))
    with pytest.raises(InputError, match="contains no records"):
        next(read_training_batches(source, CONFIG, 2, TrainingOrder(1, 3)))


def test_evaluation_reads_every_pack_once_and_fills_the_last_batch(packed) -> None:
    source = open_local_records(packed)
    batches = list(read_evaluation_batches(source, CONFIG, 8))
    assert [batch["input_ids"].shape for batch in batches] == [(8, data.LENGTH)] * 4
    assert not any(batches[-1][name][5:].any() for name in ("next_sentence_weights", "masked_lm_weights"))
    sequences = sum(int(batch["next_sentence_weights"].sum()) for batch in batches)
    assert sequences == sum(len(pack) for pack in data.make_packs(29))
    shares = [rows(read_evaluation_batches(source, CONFIG, 8, rank, 3)) for rank in range(3)]
    assert sorted(row for share in shares for row in share) == sorted(rows(batches))
    assert len(rows(read_evaluation_batches(source, CONFIG, 8, max_packs=3))) == 8


# --- what is refused


def one_error(folder: Path, config: BertConfig = CONFIG) -> str:
    """The message of the one error that opening, checking or reading the folder gives."""
    with pytest.raises(InputError) as caught:
        source = open_local_records(folder)
        check_records_fit_model(source, config)
        order = TrainingOrder(seed=1, shuffle_packs=5)
        list(islice(read_training_batches(source, config, 4, order), 10))
    return str(caught.value)


def test_data_that_does_not_fit_the_model_is_refused(packed, tmp_path) -> None:
    assert "model.max_position_embeddings = 22" in one_error(packed, replace(CONFIG, max_position_embeddings=22))
    assert "has 61 tokens, but the model has only model.vocab_size = 60" in one_error(packed, replace(CONFIG, vocab_size=60))
    unknown = data.write_packed(tmp_path / "unknown", data.make_packs(29), vocabulary=None)
    message = one_error(unknown, replace(CONFIG, vocab_size=50))
    assert re.search(r"packed-00000-0000.*: record .* must be between 0 and 49", message), message


def write_one(folder: Path, change) -> Path:
    """Four unpacked records, the third of which went through `change` (a dictionary of features)."""
    folder.mkdir()
    sequences = [sequence for pack in data.make_packs(3) for sequence in pack][:4]
    features = [data.unpacked_features(sequence) for sequence in sequences]
    features[2] = change(features[2])
    data.write_records(folder / "part-0", [data.example_bytes(each) for each in features])
    return folder


@pytest.mark.parametrize(
    ("feature", "values", "expected"),
    [
        ("input_ids", np.arange(5), "feature `input_ids` must have 23 values, but has 5"),
        ("segment_ids", None, "feature `segment_ids` is missing"),
        ("next_sentence_labels", np.array([2]), "next_sentence_labels[0] must be between 0 and 1, but is 2"),
        ("masked_lm_weights", np.full(data.PREDICTIONS, np.nan), "but is nan; use the model"),
        ("input_mask", np.arange(data.LENGTH) % 2 == 0, "is 0 at position 1 and 1 at position 2"),
        ("input_mask", np.zeros(data.LENGTH, np.int64), "is 0 at position 0"),
    ],
)
def test_a_wrong_record_is_named(tmp_path, feature, values, expected) -> None:
    def change(features):
        kept = {name: value for name, value in features.items() if name != feature}
        return kept if values is None else {**kept, feature: values}

    assert re.search(f"part-0: record 2: .*{re.escape(expected)}", one_error(write_one(tmp_path / "train", change)))


def test_not_an_example_and_not_records(packed, tmp_path) -> None:
    """Nor are packs without metadata taken for sequences."""
    folder = write_one(tmp_path / "train", lambda features: features)
    good = data.example_bytes(data.unpacked_features(data.make_packs(1)[0][0]))
    data.write_records(folder / "part-0", [good, b"\xff" * 40])
    assert "part-0: record 1: " in one_error(folder)
    with pytest.raises(InputError, match="nothing-here"):
        open_local_records(tmp_path / "nothing-here")
    shutil.copytree(packed, tmp_path / "bare", ignore=shutil.ignore_patterns("metadata.json"))
    assert "metadata.json is missing" in one_error(tmp_path / "bare")


def test_a_number_of_processes_without_streams_of_their_own_is_said_with_its_cost(tmp_path: Path) -> None:
    source = open_local_records(make_case(tmp_path / "case").packed)
    assert source.parallel_stream_count == 32
    assert [source.format_shared_shards_note(processes) for processes in (1, 2, 8, 32)] == [None] * 4
    for processes, (readers, frequency, multiple) in {3: (3, "only once", 33), 1024: (32, "less often", 512)}.items():
        expected = f"by {readers} of the {processes} processes.* each shard {frequency}.*packing.shard_multiple={multiple}"
        assert re.fullmatch(f".*{expected}", source.format_shared_shards_note(processes))
