"""Tables of other tools become ordinary unpacked records, or are refused by file, row and reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pyarrow = pytest.importorskip("pyarrow", exc_type=ImportError)
parquet = pytest.importorskip("pyarrow.parquet", exc_type=ImportError)

from gaudi_bert.artefacts.results import StageOutput  # noqa: E402
from gaudi_bert.common.errors import InputError  # noqa: E402
from gaudi_bert.common.progress import Reporter  # noqa: E402
from gaudi_bert.tables.import_tables import import_tables  # noqa: E402
from gaudi_bert.tfrecords.scanning.contract import canonical_example  # noqa: E402
from gaudi_bert.tfrecords.wire.example import decode_example  # noqa: E402
from gaudi_bert.tfrecords.wire.framing import read_records  # noqa: E402
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema  # noqa: E402
from tests.builders.reporters import QUIET  # noqa: E402


def write_parquet(path: Path, table) -> None:
    parquet.write_table(table, path, row_group_size=2)


def write_stream(path: Path, table) -> None:
    """As Hugging Face datasets do."""
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_file(path: Path, table) -> None:
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def decoded(path: Path) -> list[dict]:
    return [decode_example(payload) for payload in read_records(path)]


@pytest.mark.parametrize(
    ("suffix", "write"),
    [("parquet", write_parquet), ("arrow", write_stream), ("arrow", write_file), ("feather", write_file)],
)
def test_ragged_rows_without_anything_else(tmp_path: Path, suffix: str, write) -> None:
    rows = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14, 15], [16, 17]]
    source = tmp_path / "source"
    source.mkdir()
    write(source / f"data-00000.{suffix}", pyarrow.table({"input_ids": rows, "text": list("abcde")}))
    result = import_tables(source, tmp_path / "records", reporter=QUIET).content
    assert result.sequences == 5
    assert (result.max_sequence_length, result.max_predictions) == (5, 1)
    assert result.ignored_columns == ("text",)
    records = decoded(tmp_path / "records" / "data-00000.tfrecord")
    assert [record["input_ids"].tolist() for record in records] == [row + [0] * (5 - len(row)) for row in rows]
    assert [int(record["input_mask"].sum()) for record in records] == [3, 1, 2, 5, 2]
    assert all(record["masked_lm_weights"].tolist() == [0.0] for record in records)


def test_hugging_face_columns(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "input_ids": pyarrow.array(
                [[101, 7, 103, 102, 9, 102, 0, 0], [101, 103, 102, 102, 0, 0, 0, 0]], pyarrow.list_(pyarrow.int32(), 8)
            ),
            "attention_mask": [[1] * 6 + [0] * 2, [1] * 4 + [0] * 4],
            "token_type_ids": [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]],
            "labels": [[-100, -100, 8, -100, 9, -100, -100, -100], [-100, 55] + [-100] * 6],
            "next_sentence_label": [1, 0],
        }
    )
    write_parquet(tmp_path / "a.parquet", table)
    import_tables(tmp_path / "a.parquet", tmp_path / "records", max_predictions=3, reporter=QUIET)
    first, second = decoded(tmp_path / "records" / "a.tfrecord")
    assert first["input_ids"].tolist() == [101, 7, 103, 102, 9, 102]
    assert first["segment_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    assert first["masked_lm_positions"].tolist() == [2, 4, 0]
    assert first["masked_lm_ids"].tolist() == [8, 9, 0]
    assert first["masked_lm_weights"].tolist() == [1, 1, 0]
    assert first["next_sentence_labels"].tolist() == [1]
    assert second["input_ids"].tolist() == [101, 103, 102, 102, 0, 0]
    assert second["masked_lm_positions"].tolist() == [1, 0, 0]


def test_columns_of_the_contract_come_back_as_they_were(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "input_ids": [[101, 7, 102, 0], [101, 8, 9, 102]],
            "input_mask": [[1, 1, 1, 0], [1, 1, 1, 1]],
            "segment_ids": [[0, 0, 1, 0], [0, 0, 0, 1]],
            "masked_lm_positions": [[1, 0], [1, 2]],
            "masked_lm_ids": [[70, 0], [80, 90]],
            "masked_lm_weights": [[1.0, 0.0], [1.0, 1.0]],
            "next_sentence_labels": [[1], [0]],
        }
    )
    write_parquet(tmp_path / "a.parquet", table)
    import_tables(tmp_path / "a.parquet", tmp_path / "records", reporter=QUIET)
    path = tmp_path / "records" / "a.tfrecord"
    assert all(canonical_example(payload, UnpackedSchema(4, 2)) == payload for payload in read_records(path))
    for number, record in enumerate(decoded(path)):
        for name in table.column_names:
            assert record[name].tolist() == table.column(name)[number].as_py()


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"input_ids": [[1, 2], []]}, "row 1: has no token"),
        ({"input_ids": [[1, 2], None]}, "row 1: input_ids is null"),
        ({"input_ids": [[1, 2], [1, None]]}, "row 1: input_ids holds a null"),
        ({"input_ids": [[1, 2], [1, -2]]}, "row 1: input_ids: holds -2 at 1, 0 to 2097151 is allowed"),
        ({"input_ids": [[1, 2], [1, 2**21]]}, "row 1: input_ids: holds 2097152 at 1, 0 to 2097151 is allowed"),
        ({"input_ids": [[1, 2]], "labels": [[-100, 2**21]]}, "row 0: ids of masked positions: holds 2097152 at 0"),
        ({"input_ids": [[1, 2], [1] * 8193]}, "row 1: has 8193 tokens, at most 8192 are allowed"),
        ({"input_ids": [1, 2]}, "column input_ids holds int64; it must hold lists"),
        ({"input_ids": [[1], [2]], "attention_mask": [1, 1]}, "column attention_mask holds int64; it must hold lists"),
        ({"input_ids": [[1, 2], [1.5, 2]]}, "row 1: input_ids holds 1.5; it must hold integers"),
        ({"input_ids": [[True, False]]}, "column input_ids holds list<.*bool>; it must hold lists of integers"),
        ({"input_ids": [[1, 2]], "labels": [1]}, "column labels holds int64; .* `gaudi-bert pack TABLE`"),
        ({"input_ids": [[1, 2]], "labels": [[2.0**60, 7]]}, "row 0: labels holds 1.*e.18; it must hold integers"),
        (
            {"input_ids": [[1, 2], [1, 2, 3]], "labels": [[-100, 9], [2, 3, 5]]},
            "row 1: every token is to be predicted, as by a causal model; .* `gaudi-bert pack TABLE`",
        ),
        (
            {"input_ids": [[1, *range(11)]], "labels": [[-100, -100, *range(1, 11)]]},
            "row 0: labels are the input_ids, so no token is masked; .* `gaudi-bert pack TABLE`",
        ),
        ({"input_ids": [["a"], ["b"]]}, "column input_ids holds list<.*string>"),
        ({"tokens": [[1], [2]]}, "has no column input_ids"),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [0, 1]]}, "row 1: its mask is not 1..1 0..0"),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1]]}, "row 1: attention_mask has 1 values for 2"),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[-100, -100], [-100, 9, 9]]}, "row 1: labels has 3 values for 2"),
        (
            {"input_ids": [[1, 0]], "attention_mask": [[1, 0]], "labels": [[-100, 3]]},
            "row 0: labels predict a token in the padding",
        ),
        ({"input_ids": [[1, 2]], "next_sentence_label": [2]}, "row 0: next_sentence_label: holds 2 at 0, 0 to 1 is allowed"),
        (
            {"input_ids": [[1, 2]], "masked_lm_positions": [[2]], "masked_lm_ids": [[9]]},
            "row 0: masked positions: holds 2 at 0, 0 to 1 is allowed",
        ),
        ({"input_ids": [[1, 2]], "masked_lm_positions": [[1]]}, "has a column masked_lm_positions, but"),
    ],
)
def test_rows_that_are_no_sequences_are_refused(tmp_path: Path, columns: dict, reason: str) -> None:
    write_parquet(tmp_path / "bad.parquet", pyarrow.table(columns))
    with pytest.raises(InputError, match=rf"bad[.]parquet: {reason}"):
        import_tables(tmp_path / "bad.parquet", tmp_path / "records", reporter=QUIET)
    assert not (tmp_path / "records" / "examples.json").exists()


@pytest.mark.parametrize("label", [2**64 - 100, 2**63])
def test_unsigned_numbers_do_not_become_negative(tmp_path: Path, label: int) -> None:
    labels = pyarrow.array([[9, label]], pyarrow.list_(pyarrow.uint64()))
    write_parquet(tmp_path / "bad.parquet", pyarrow.table({"input_ids": [[1, 2]], "labels": labels}))
    with pytest.raises(InputError, match=f"row 0: labels holds {label}; it must hold integers"):
        import_tables(tmp_path / "bad.parquet", tmp_path / "records", reporter=QUIET)
    assert not (tmp_path / "records").exists()


def test_nothing_is_cut(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pyarrow.table({"input_ids": [[1], [1, 2, 3]], "labels": [[7], [7, 7, -100]]}))
    with pytest.raises(InputError, match=r"row 1: has 3 tokens, allowed are 1 to 2; raise --max-sequence-length"):
        import_tables(tmp_path / "a.parquet", tmp_path / "one", max_sequence_length=2, reporter=QUIET)
    with pytest.raises(InputError, match=r"row 1: has 2 masked positions, allowed are 0 to 1; raise --max-predictions"):
        import_tables(tmp_path / "a.parquet", tmp_path / "two", max_predictions=1, reporter=QUIET)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match=r"a[.]parquet: cannot be read as a Parquet or Arrow table"):
        import_tables(tmp_path, tmp_path / "records", reporter=QUIET)
    with pytest.raises(InputError, match="does not exist"):
        import_tables(tmp_path / "absent", tmp_path / "records", reporter=QUIET)
    (tmp_path / "splits" / "train").mkdir(parents=True)
    write_stream(tmp_path / "splits" / "train" / "data-0.arrow", pyarrow.table({"input_ids": [[1]]}))
    with pytest.raises(InputError, match="holds the splits train; pass one of them"):
        import_tables(tmp_path / "splits", tmp_path / "records", reporter=QUIET)


def save_to_disk(folder: Path, shards: list[list[list[int]]]) -> None:
    """What `datasets.Dataset.save_to_disk` leaves: Arrow streams, and state.json with their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        write_stream(folder / name, pyarrow.table({"input_ids": rows}))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0" * 16, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))


def test_files_of_an_earlier_save_are_no_part_of_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_to_disk(tmp_path / "saved", [[[1, 2]] * 11, [[3]] * 13, [[4]] * 17])
    save_to_disk(tmp_path / "saved", [[[5, 6, 7], [8]], [[9]]])
    result = import_tables(tmp_path / "saved", tmp_path / "records", reporter=Reporter()).content
    assert (result.files, result.sequences, result.max_sequence_length) == (2, 3, 3)
    assert "state.json does not name data-00000-of-00003.arrow, data-00001-of-00003.arrow" in capsys.readouterr().err
    assert [record["input_ids"].tolist() for record in decoded(tmp_path / "records" / "data-00001-of-00002.tfrecord")] == [
        [9, 0, 0]
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"_data_files": [{"filename": "data-00007-of-00008.arrow"}]}, "missing, state.json names it"),
        ({"_data_files": []}, "names no files"),
        ({"_data_files": [{"filename": "../other.arrow"}]}, "names no files"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "a selection of rows"),
    ],
)
def test_a_damaged_dataset_folder_is_refused(tmp_path: Path, change: dict, reason: str) -> None:
    save_to_disk(tmp_path / "saved", [[[1, 2]]])
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    (tmp_path / "saved" / "state.json").write_text(json.dumps({**state, **change}))
    with pytest.raises(InputError, match=reason):
        import_tables(tmp_path / "saved", tmp_path / "records", reporter=QUIET)


def test_sizes_that_no_record_may_have(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pyarrow.table({"input_ids": [[1]]}))
    with pytest.raises(InputError, match="max_sequence_length = 8193: 1 to 8192 is allowed"):
        import_tables(tmp_path / "a.parquet", tmp_path / "out", max_sequence_length=8193, max_predictions=3, reporter=QUIET)


def test_shards_together_are_the_whole_and_a_second_run_does_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    rng = np.random.default_rng(5)
    for number in range(5):
        rows = [rng.integers(1, 90, size).tolist() for size in rng.integers(1, 14, 7)]
        write_parquet(source / f"part-{number}.parquet", pyarrow.table({"input_ids": rows}))
    sizes = {"max_sequence_length": 13, "max_predictions": 2}
    whole = import_tables(source, tmp_path / "whole", reporter=QUIET, **sizes)
    for index in range(2):
        assert not (tmp_path / "shards" / "examples.json").exists()
        import_tables(source, tmp_path / "shards", shard=(index, 2), reporter=QUIET, **sizes)
    for path in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "shards" / path.name).read_bytes() == path.read_bytes()
    assert import_tables(source, tmp_path / "whole", reporter=QUIET, **sizes) == StageOutput(whole.content, skipped=True)
    with pytest.raises(InputError, match="--overwrite"):
        import_tables(source, tmp_path / "whole", max_sequence_length=14, max_predictions=2, reporter=QUIET)
