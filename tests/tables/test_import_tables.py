"""Tables of other tools become unpacked records, or are refused by file, row and reason; and packs go out as Parquet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

import pyarrow
from pyarrow import parquet

from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.shards import count_shards
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.reporting.estimate import estimate
from gaudi_bert.tables.import_tables import import_tables
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tables.packed_parquet import PARQUET_PACKS
from gaudi_bert.tables.verify import verify_table
from gaudi_bert.tfrecords.convert import convert
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.tfrecords.scanning.scan import canonical_example
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema
from tests.builders.command_line import run_command
from tests.builders.packing_case import make_case, sequence_key, unpacked_key
from tests.builders.reporters import QUIET
from tests.builders.shards import shards_of
from tests.builders.tables import random_rows, write_dataset, write_file, write_parquet, write_stream


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
    write(source / f"data-00000.{suffix}", pyarrow.table({"input_ids": rows, "text": list("abcde")}), 2)
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


OTHER_COMMAND = "`gaudi-bert pack TABLE`"


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
        ({"input_ids": [[1, 2]], "labels": [1]}, f"column labels holds int64; .*{OTHER_COMMAND}"),
        ({"input_ids": [[1, 2]], "labels": [[2.0**60, 7]]}, "row 0: labels holds 1.*e.18; it must hold integers"),
        ({"input_ids": [[1, 2], [1, 2, 3]], "labels": [[-100, 9], [2, 3, 5]]}, f"row 1: every token is .*{OTHER_COMMAND}"),
        ({"input_ids": [[1, *range(11)]], "labels": [[-100, -100, *range(1, 11)]]}, f"row 0: labels are .*{OTHER_COMMAND}"),
        ({"input_ids": [["a"], ["b"]]}, "column input_ids holds list<.*string>"),
        ({"tokens": [[1], [2]]}, "has no column input_ids"),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [0, 1]]}, "row 1: its mask is not 1..1 0..0"),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1]]}, "row 1: attention_mask has 1 values for 2"),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[-100, -100], [-100, 9, 9]]}, "row 1: labels has 3 values for 2"),
        ({"input_ids": [[1, 0]], "attention_mask": [[1, 0]], "labels": [[-100, 3]]}, "row 0: labels .* in the padding"),
        ({"input_ids": [[1, 2]], "next_sentence_label": [2]}, "row 0: next_sentence_label: holds 2 at 0, 0 to 1 is allowed"),
        ({"input_ids": [[1, 2]], "masked_lm_positions": [[2]], "masked_lm_ids": [[9]]}, "row 0: masked positions: holds 2"),
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
    with pytest.raises(InputError, match="max_sequence_length = 8193: 1 to 8192 is allowed"):
        import_tables(tmp_path / "a.parquet", tmp_path / "out", max_sequence_length=8193, max_predictions=3, reporter=QUIET)


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


def test_files_of_an_earlier_save_are_no_part_of_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "saved", [{"input_ids": [1, 2]}] * 41, files=3)
    write_dataset(tmp_path / "saved", [{"input_ids": row} for row in ([5, 6, 7], [8], [9])])
    result = import_tables(tmp_path / "saved", tmp_path / "records", reporter=Reporter()).content
    assert (result.files, result.sequences, result.max_sequence_length) == (2, 3, 3)
    assert "state.json does not name data-00000-of-00003.arrow, data-00001-of-00003.arrow" in capsys.readouterr().err
    records = decoded(tmp_path / "records" / "data-00001-of-00002.tfrecord")
    assert [record["input_ids"].tolist() for record in records] == [[8, 0, 0], [9, 0, 0]]


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
    write_dataset(tmp_path / "saved", [{"input_ids": [1, 2]}], files=1)
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    (tmp_path / "saved" / "state.json").write_text(json.dumps({**state, **change}))
    with pytest.raises(InputError, match=reason):
        import_tables(tmp_path / "saved", tmp_path / "records", reporter=QUIET)


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


# --- token ids of another name: each command gives what it gives of the same table with `input_ids`


L = 64
ROWS = [row["input_ids"] for row in random_rows(310, L, seed=4)]


def write_named(folder: Path, name: str) -> Path:
    """The same rows in three formats' files: two of Parquet, one of JSON lines; with a scalar column."""
    folder.mkdir()
    for number, rows in enumerate((ROWS[:100], ROWS[100:170])):
        table = pyarrow.table({"weight": [0.5] * len(rows), name: rows})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=33)
    lines = (json.dumps({"weight": 0.5, name: row}) + "\n" for row in ROWS[170:])
    (folder / "2.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def same_tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tables")
    return write_named(folder / "named", "tokens"), write_named(folder / "usual", "input_ids")


def test_packs_have_the_usual_name(same_tables, tmp_path: Path) -> None:
    named, usual = same_tables
    pack_table(named, tmp_path / "a", TableSettings(max_sequence_length=L, input_column="tokens"), reporter=QUIET)
    pack_table(usual, tmp_path / "b", TableSettings(max_sequence_length=L), reporter=QUIET)
    shards = sorted(path.name for path in (tmp_path / "b").glob("packed-*"))
    assert shards == ["packed-00000-00000.parquet"], "so few packs are one file"
    for name in shards:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert verify_table(named, tmp_path / "a", reporter=QUIET).content.sequences == len(ROWS)
    index = TableSettings(max_sequence_length=L, input_column="tokens", index_only=True)
    pack_table(named, tmp_path / "index", index, reporter=QUIET, verified=True)


def test_what_takes_a_table(same_tables, tmp_path: Path) -> None:
    named, usual = same_tables
    results = [
        estimate(source, depths=["max"], algorithms=["lpfhp"], reporter=QUIET, max_sequence_length=L, input_column=column)
        for source, column in ((named, "tokens"), (usual, "input_ids"))
    ]
    assert [result.sequences for result in results] == [len(ROWS)] * 2
    assert results[0].rows[0].packs == results[1].rows[0].packs
    assert results[0].tokens == sum(map(len, ROWS))
    longest = estimate(usual / "2.jsonl", depths=["max"], algorithms=["none"], reporter=QUIET)
    assert (longest.sequences, longest.max_sequence_length) == (140, max(map(len, ROWS[170:])))
    imported = [
        import_tables(source, tmp_path / column, reporter=QUIET, input_column=column).content
        for source, column in ((named, "tokens"), (usual, "input_ids"))
    ]
    assert imported[0] == imported[1]
    for path in (tmp_path / "tokens").glob("*.tfrecord"):
        assert path.read_bytes() == (tmp_path / "input_ids" / path.name).read_bytes()


def test_two_names_or_an_unknown_one_are_refused(same_tables, tmp_path: Path) -> None:
    named, _ = same_tables
    done = run_command("pack", named, "--out", tmp_path / "out", "--max-sequence-length", L)
    assert done.returncode == 2
    assert "has no column input_ids (it has weight, tokens); name the token ids with --input-column" in done.stderr
    both = tmp_path / "both.parquet"
    parquet.write_table(pyarrow.table({"tokens": [[1]], "input_ids": [[1]]}), both)
    settings = TableSettings(max_sequence_length=L, input_column="tokens")
    with pytest.raises(InputError, match="has both input_ids and tokens; rename it, or name the columns"):
        pack_table(both, tmp_path / "out", settings, reporter=QUIET)


@pytest.mark.parametrize(
    ("packs", "bytes_of_all", "shards"),
    [
        *((1, 1, 1), (151, 1, 1), (1024, 1, 1), (1025, 1, 2), (8712, 1, 16), (32_768, 1, 32), (10**6, 1, 32)),
        *((151, 301, 4), (151, 100 * 151, 160), (1000, 100 * 41, 64)),
    ],
)
def test_shards_of_small_tables(packs: int, bytes_of_all: int, shards: int) -> None:
    """A divisor of 32, or a multiple of it; never more than 100 bytes or 1,024 packs in one, where there are fewer."""
    actual = count_shards(packs, bytes_of_all, 32, 100, packs_of_a_shard=1024)
    assert actual == shards
    assert actual % 32 == 0 or 32 % actual == 0


# --- packs as Parquet hold what the TFRecords hold, under the names of Hugging Face


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
