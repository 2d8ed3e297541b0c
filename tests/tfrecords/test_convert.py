"""Packs for other trainers: every sequence is read back, the bytes are the same each time, nothing is lost or taken over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("h5py", exc_type=ImportError)

from gaudi_bert.artefacts.packed import RecordMetadata, conversion_summary_path
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.convert import convert_to_hdf5
from gaudi_bert.tfrecords.write import pack_records
from tests.builders.folders import contents
from tests.builders.packing_case import make_case, sequences_for_hdf5, unpacked_key, write_hdf5
from tests.builders.properties import examples
from tests.builders.reporters import QUIET, a_run
from tests.oracles.packed_record import read_packs, sequences_of


def packs_of(folder: Path, sequences: list[dict], **settings) -> Path:
    """The packs of sequences in the folder `packed` of `folder`."""
    third = len(sequences) // 3 + 1
    for number in range(3):
        part = sequences[number * third : (number + 1) * third]
        if part:
            write_hdf5(folder / "records" / f"{number}.hdf5", part)
    chosen = {"algorithm": "lpfhp", "group_sequences": third, "shard_multiple": 3, **settings}
    pack_records(folder / "records", folder / "packed", PackingSettings(**chosen), a_run())
    return folder / "packed"


def refused(packed: Path, out: Path, message: str, **how: bool) -> None:
    with pytest.raises(InputError, match=message):
        convert_to_hdf5(packed, out, reporter=QUIET, **how)


@pytest.mark.slow
@given(
    depth=st.integers(1, 3),
    count=st.integers(1, 90),
    length=st.integers(2, 31),
    predictions=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@examples(20)
def test_every_sequence_is_read_back(tmp_path_factory, depth, count, length, predictions, seed) -> None:
    folder, sequences = tmp_path_factory.mktemp("packs"), sequences_for_hdf5(count, length, predictions, seed)
    packed = packs_of(folder, sequences, depth=depth)
    result = convert_to_hdf5(packed, folder / "out", reporter=QUIET).content
    packs = read_packs(folder / "out", length, predictions)
    metadata = RecordMetadata.read(packed)
    assert (result.packs, result.sequences) == (len(packs), count) == (metadata.packs, metadata.sequences)
    back = [key for each in packs for key in sequences_of(each)]
    assert sorted(back) == sorted(map(unpacked_key, sequences))


def test_a_pack_of_all_masked_slots_ends_in_an_unused_one(tmp_path: Path) -> None:
    """The vendor's reader would take its --max_predictions_per_seq for the number of slots where none is 0."""
    sequences = [each for each in sequences_for_hdf5(400, 13, 4, seed=2) if sum(each["masked_lm_weights"]) == 4]
    packed = packs_of(tmp_path, sequences, depth=2)
    convert_to_hdf5(packed, tmp_path / "out", reporter=QUIET)
    packs = read_packs(tmp_path / "out", 13, 4)
    assert max(sum(map(bool, each["masked_lm_ids"])) for each in packs) == 8
    assert {len(each["masked_lm_ids"]) for each in packs} == {9}


def test_the_metadata_beside_it_is_the_vendors(tmp_path: Path) -> None:
    packed = packs_of(tmp_path, sequences_for_hdf5(90, 29, 5, seed=1))
    convert_to_hdf5(packed, tmp_path / "training", reporter=QUIET)
    beside, metadata = json.loads((tmp_path / "training_metadata.json").read_text()), RecordMetadata.read(packed)
    strategies: dict[tuple, int] = {}
    for each in read_packs(tmp_path / "training", 29, 5):
        lengths = tuple(sorted(len(ids) for ids, *_ in sequences_of(each)))
        strategies[lengths] = strategies.get(lengths, 0) + 1
    assert beside["avg_seq_per_sample"] == 90 / metadata.packs
    assert beside["number_of_sequences_dropped"] == 0
    assert beside["number_of_strategies_utilized"] == len(strategies)
    best = sorted(strategies, key=lambda lengths: (-strategies[lengths], lengths))[:8]
    assert beside["top_8_strategies"] == [list(lengths) for lengths in best]
    assert (beside["new_number_of_samples"], beside["original_number_of_samples"]) == (metadata.packs, 90)
    assert beside["expected_speed_up"] <= beside["theoretical_speed_up"]
    assert set(beside) >= {"compression_ratio", "padding_tokens_packed_dataset", "padding_tokens_original_dataset"}


def test_the_same_packs_give_the_same_bytes_and_a_run_that_was_killed_continues(tmp_path: Path) -> None:
    packed, out = packs_of(tmp_path, sequences_for_hdf5(200, 29, 5, seed=1)), tmp_path / "out"
    assert not convert_to_hdf5(packed, out, reporter=QUIET, workers=1).skipped
    assert convert_to_hdf5(packed, out, reporter=QUIET).skipped
    before, beside = contents(out), (tmp_path / "out_metadata.json").read_bytes()
    convert_to_hdf5(packed, tmp_path / "other", reporter=QUIET, workers=3)
    assert contents(tmp_path / "other") == before
    assert all(path.is_file() and not path.name.startswith(".") for path in out.iterdir())
    lost, *kept = sorted(out.iterdir())
    times = [path.stat().st_mtime_ns for path in kept]
    for path in (lost, tmp_path / "out_metadata.json", conversion_summary_path(out)):
        path.unlink()
    assert not convert_to_hdf5(packed, out, reporter=QUIET).skipped
    assert (contents(out), (tmp_path / "out_metadata.json").read_bytes()) == (before, beside)
    assert [path.stat().st_mtime_ns for path in kept] == times


def test_what_is_not_ours_is_never_taken_over(tmp_path: Path) -> None:
    packed = packs_of(tmp_path, sequences_for_hdf5(40, 29, 5, seed=1))
    (tmp_path / "out_metadata.json").write_text("{}")
    refused(packed, tmp_path / "out", r"out_metadata.json: the file exists already, .*; choose another output folder")
    assert (tmp_path / "out_metadata.json").read_text() == "{}"
    for out in (packed, tmp_path):
        refused(packed, out, "the output folder must not contain the packed folder", overwrite=True)
    refused(Path("s3://bucket/packed"), tmp_path / "other", "s3://bucket/packed: only local folders can be converted")


def test_packs_that_a_format_cannot_hold_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    deep = make_case(tmp_path / "deep", depth=4, algorithm="lpfhp").packed
    first = make_case(tmp_path / "first", algorithm="lpfhp").packed  # some of its sequences mask their first token
    refused(deep, tmp_path / "out", r"at most 3 sequences, .* the depth is 4; pack again with --depth 3")
    refused(first, tmp_path / "out", r"tfrecord: record \d+: the pack masks the first token of its row or predicts id 0")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["packed-00000-00000.tfrecord", "group-00000.json", "metadata.json"])
def test_a_folder_that_is_not_as_it_was_packed_is_refused(tmp_path: Path, name: str) -> None:
    file = packs_of(tmp_path, sequences_for_hdf5(12, 29, 5, seed=1)) / name
    if file.suffix == ".json":
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, "sequences": content["sequences"] + 1}))
    else:
        file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(FailedError):
        convert_to_hdf5(file.parent, tmp_path / "out", reporter=QUIET)
    assert not (tmp_path / "out").exists()
