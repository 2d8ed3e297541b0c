"""Inspect shows what is in a record, packed or not, and says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.inspect import RecordView, SequenceView, inspect_record
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from tests.builders.packing_case import make_case, packed_keys, sequence_key
from tests.oracles.wire import example, frame

FEATURES = {
    "input_ids": [2, 5, 4, 6, 3, 7, 3, 0],
    "input_mask": [1, 1, 1, 1, 1, 1, 1, 0],
    "segment_ids": [0, 0, 0, 0, 0, 1, 1, 0],
    "masked_lm_positions": [2, 5, 0],
    "masked_lm_ids": [8, 7, 0],
    "masked_lm_weights": [1.0, 1.0, 0.0],
    "next_sentence_labels": [1],
}
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##se", "house", "dog"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    path = tmp_path / "part-0"
    path.write_bytes(frame(example({**FEATURES, "document": [4, 2]})) + frame(example(FEATURES)))
    return path


def shown(view: RecordView) -> str:
    return "\n".join(view.format_lines())


def test_an_unpacked_record_with_tokens(file: Path) -> None:
    view = inspect_record(file, 0, file.with_name("vocab.txt"))
    assert (view.packed, view.tokens, view.padding, view.problems) == (False, 7, 1, ())
    assert view.other_features == {"document": 2}
    (sequence,) = view.sequences
    assert sequence.tokens == ("[CLS]", "the", "[MASK]", "##se", "[SEP]", "house", "[SEP]")
    assert sequence.segments == ((0, 5), (1, 2))
    assert [(one.position, one.id, one.token) for one in sequence.masked] == [(2, 8, "dog"), (5, 7, "house")]
    text = shown(view)
    assert "[CLS] the [MASK]→dogse [SEP] house→house [SEP]" in text
    assert "7 tokens (5 + 2) from 0, 2 masked, random next" in text
    assert "also contains document (2 values)" in text


def test_without_a_vocabulary_ids_are_shown(file: Path) -> None:
    assert "2 5 4→8 6 3 7→7 3" in shown(inspect_record(file, 1))


def key_of(sequence: SequenceView) -> tuple:
    segments = [segment for segment, count in sequence.segments for _ in range(count)]
    masked = [(each.position, each.id) for each in sequence.masked]
    return sequence_key(list(sequence.input_ids), segments, masked, sequence.next_sentence_label)


def test_packed_records_show_each_sequence(tmp_path: Path) -> None:
    case = make_case(tmp_path, depth=4, algorithm="lpfhp")
    path = max(case.packed.glob("*.tfrecord"), key=lambda path: path.stat().st_size)
    for number, payload in enumerate(read_records(path)):
        view = inspect_record(path, number)
        assert (view.packed, view.problems) == (True, ())
        keys = [key_of(sequence) for sequence in view.sequences]
        assert keys == packed_keys({name: values.tolist() for name, values in decode_example(payload).items()})
        assert all(f"\n{number}  " in shown(view) for number in range(1, len(keys) + 1))


@pytest.mark.parametrize(
    "change", [{"input_mask": [1, 1, 0, 1, 0, 0, 0, 0]}, {"masked_lm_positions": [2, 7, 0]}, {"segment_ids": [0] * 7}]
)
def test_what_is_wrong_is_said(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "part-0"
    path.write_bytes(frame(example({**FEATURES, **change})))
    view = inspect_record(path)
    assert [f"`{name}`" in problem for problem in view.problems for name in change] == [True]
    assert "PROBLEM: " in shown(view)


def test_ids_outside_the_vocabulary(file: Path) -> None:
    file.with_name("vocab.txt").write_text("\n".join(TOKENS[:7]) + "\n")
    view = inspect_record(file, 0, file.with_name("vocab.txt"))
    assert view.problems == ("sequence 1: 3 ids are not in the vocabulary, which has 7 tokens",)
    assert "<7>" in shown(view)


def test_every_id_of_the_vocabulary_belongs_to_it(file: Path) -> None:
    ids = {"input_ids": [2, 0, 4, 6, 3, 8, 3, 0], "masked_lm_ids": [0, 8, 0]}
    file.write_bytes(frame(example({**FEATURES, **ids})))
    view = inspect_record(file, 0, file.with_name("vocab.txt"))
    assert view.problems == ()
    assert "[CLS] [PAD] [MASK]→[PAD]" in shown(view)


def test_what_cannot_be_shown(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(frame(example({"image": [1, 2]})))
    (tmp_path / "rubbish").write_bytes(frame(b"\xff\xff rubbish"))
    for arguments, reason in (
        ((file, 2), "does not contain record 2"),
        ((file, -1), "does not contain record -1"),
        ((file, 0, tmp_path / "absent.txt"), "cannot read"),
        ((tmp_path / "other",), "expected the features input_ids.* found image"),
        ((tmp_path / "rubbish",), "record 0: the record is not a tf.train.Example"),
    ):
        with pytest.raises(InputError, match=reason):
            inspect_record(*arguments)


def test_a_folder_is_its_first_file_with_records(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=2, sequences_per_file=1, shard_multiple=8)
    (case.records / "_SUCCESS").touch()
    (case.records / "README.md").write_text("notes\n")
    assert inspect_record(case.records, 0) == inspect_record(case.records / "part-0", 0)
    assert inspect_record(case.packed, 0) == inspect_record(case.packed / "packed-00000-00000.tfrecord", 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        InputError, match=r"the folder contains no record files \(names that begin with _ or \. are ignored\)"
    ):
        inspect_record(tmp_path / "empty")
