"""Packs as Parquet hold what the TFRecords hold, under the names of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)
parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)

from gaudi_bert.common.errors import InputError  # noqa: E402
from gaudi_bert.tables.packed_parquet import PARQUET_PACKS  # noqa: E402
from gaudi_bert.tfrecords.convert import convert  # noqa: E402
from gaudi_bert.tfrecords.packed_folder import read_metadata  # noqa: E402
from tests.builders.packing_case import make_case, sequence_key, unpacked_key  # noqa: E402
from tests.builders.reporters import QUIET  # noqa: E402
from tests.builders.shards import shards_of  # noqa: E402


def keys_of(row: dict) -> list[tuple]:
    keys = []
    for number, (start, length, label) in enumerate(
        zip(row["sequence_starts"], row["seq_lens"], row["next_sentence_labels"], strict=True), 1
    ):
        inside = slice(start, start + length)
        assert row["sequence_ids"][inside] == [number] * length
        assert row["position_ids"][inside] == list(range(length))
        masked = [(position, id_) for position, id_ in enumerate(row["labels"][inside]) if id_ != -100]
        keys.append(sequence_key(row["input_ids"][inside], row["token_type_ids"][inside], masked, label))
    used = sum(row["seq_lens"])
    assert row["sequence_ids"][used:] == [0] * (len(row["sequence_ids"]) - used)
    return keys


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_every_sequence_is_in_the_parquet_files_once(tmp_path: Path, depth: int) -> None:
    case = make_case(tmp_path, depth=depth, algorithm="lpfhp")
    result = convert(case.packed, tmp_path / "parquet", PARQUET_PACKS, reporter=QUIET).content
    metadata = read_metadata(case.packed)
    written = [shard for shard in shards_of(case.packed) if shard.packs]
    assert (result.files, result.packs, result.sequences) == (len(written), metadata.packs, metadata.sequences)
    assert not (tmp_path / "parquet_metadata.json").exists()
    actual = []
    for shard in written:
        table = parquet.read_table(tmp_path / "parquet" / f"{Path(shard.name).stem}.parquet")
        assert table.num_rows == shard.packs
        for row in table.to_pylist():
            assert len(row["input_ids"]) == metadata.max_sequence_length
            actual += keys_of(row)
    # Masked positions come out in the order of the row.
    expected = [
        (ids, segments, tuple(sorted(masked)), label) for ids, segments, masked, label in map(unpacked_key, case.sequences)
    ]
    assert sorted(actual) == sorted(expected)


def test_a_folder_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=2)
    (case.packed / "metadata.json").unlink()
    with pytest.raises(InputError, match="missing"):
        convert(case.packed, tmp_path / "out", PARQUET_PACKS, reporter=QUIET)
    assert not (tmp_path / "out").exists()
