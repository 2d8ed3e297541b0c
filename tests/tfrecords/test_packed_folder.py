"""The metadata of packed folders, ours and the predecessor's: sizes from its records, counts held to what its files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.convert import convert
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.tfrecords.vendor_packs import PREDECESSOR_PACKS
from gaudi_bert.tfrecords.wire.schema import PackedSchema
from tests.builders.agree import agree
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.reporters import QUIET


@pytest.fixture
def case(tmp_path: Path) -> PackingCase:
    return make_case(tmp_path, masked_slots=8)


def as_predecessor(case: PackingCase, folder: Path) -> Path:
    """The packed folder as the predecessor would have left it; its metadata."""
    convert(case.packed, folder, PREDECESSOR_PACKS, reporter=QUIET)
    return folder.with_name(f"{folder.name}_metadata.json")


def test_what_we_write_is_read_as_the_predecessors(case: PackingCase, tmp_path: Path) -> None:
    ours = read_metadata(case.packed)
    as_predecessor(case, tmp_path / "training")
    theirs = read_metadata(tmp_path / "training")
    for name in ("sequences", "packs", "tokens", "padding_tokens", "efficiency"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert PackedSchema.of(theirs) == PackedSchema.of(ours)
    assert theirs.shard_table.packs.sum() == ours.packs


def test_the_keys_are_those_that_its_trainer_knows(case: PackingCase, tmp_path: Path) -> None:
    path = as_predecessor(case, tmp_path / "training")
    content = json.loads(path.read_text())
    metadata = read_metadata(case.packed)
    assert content["avg_seq_per_sample"] == metadata.sequences / metadata.packs
    assert content["new_number_of_samples"] == metadata.packs
    assert content["original_number_of_samples"] == len(case.sequences)
    assert content["packing_efficiency"] == metadata.tokens / (metadata.packs * metadata.max_sequence_length)
    agree(content["compression_ratio"], 1 - metadata.packs / metadata.sequences)
    assert content["sequences_dropped"] == 0
    assert 0 < len(content["top_8_strategies"]) <= 8


def test_lost_records_are_noticed(case: PackingCase, tmp_path: Path) -> None:
    as_predecessor(case, tmp_path / "training")
    next((tmp_path / "training").glob("strategy_*")).unlink()
    with pytest.raises(InputError, match=r"its files hold .* packs, training_metadata.json states"):
        read_metadata(tmp_path / "training")


def test_a_file_cut_short_is_noticed(case: PackingCase, tmp_path: Path) -> None:
    as_predecessor(case, tmp_path / "training")
    victim = next((tmp_path / "training").glob("strategy_*"))
    victim.write_bytes(victim.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"strategy_mixed_part_.*cut short"):
        read_metadata(tmp_path / "training")


@pytest.mark.parametrize(
    ("key", "value"),
    [("new_number_of_samples", "many"), ("original_number_of_samples", -1), ("padding_tokens_packed_dataset", 1e12)],
)
def test_metadata_that_cannot_be_true_is_refused(case: PackingCase, tmp_path: Path, key: str, value: object) -> None:
    sibling = as_predecessor(case, tmp_path / "training")
    sibling.write_text(json.dumps({**json.loads(sibling.read_text()), key: value}))
    with pytest.raises(InputError, match=r"training_metadata.json"):
        read_metadata(tmp_path / "training")


def test_a_folder_without_its_files(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    content = {"new_number_of_samples": 2, "original_number_of_samples": 3, "padding_tokens_packed_dataset": 1}
    (tmp_path / "training_metadata.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"holds no strategy_\*_part_\* file"):
        read_metadata(tmp_path / "training")
