"""Bad input: one clear line with file and record, a non-zero exit code, and nothing written that looks finished."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_bert.common.errors import GaudiBertError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.data.histogram import histogram
from gaudi_bert.stages.data.write import write
from tests.builders.packing_case import make_case
from tests.oracles.wire import example, frame, random_sequence

QUIET = Reporter(quiet=True)
LENGTH, PREDICTIONS, RECORDS, BAD = 24, 4, 9, 5


def good(seed: int) -> dict:
    """A legal sequence that has a masked position, and padding."""
    sequence = random_sequence(random.Random(seed), 12, 2)
    for name, size in (("input_ids", 24), ("input_mask", 24), ("segment_ids", 24), ("masked_lm_weights", 4)):
        sequence[name] += [0] * (size - len(sequence[name]))
    sequence["masked_lm_positions"], sequence["masked_lm_ids"] = [0, 0, 0, 0], [17, 0, 0, 0]
    sequence["masked_lm_weights"] = [1.0, 0.0, 0.0, 0.0]
    return sequence


def changed(**features: list | None) -> bytes:
    """A record with some features replaced, or removed where None."""
    sequence = {**good(1), **features}
    return frame(example({name: values for name, values in sequence.items() if values is not None}))


def mask(text: str) -> list[int]:
    return [int(character) for character in text.ljust(LENGTH, "0")]


def as_bytes_feature() -> bytes:
    """A record whose input_ids are a BytesList."""
    usual = example(good(1))
    return frame(usual.replace(b"input_ids", b"inputXids") + b"")


BAD_RECORDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "missing feature": (lambda: changed(segment_ids=None), "`segment_ids` is missing"),
    "another name": (as_bytes_feature, "`input_ids` is missing"),
    "wrong length": (lambda: changed(input_ids=[5] * 23), "`input_ids` has 23 values, 24 are wanted"),
    "wrong number of predictions": (lambda: changed(masked_lm_ids=[5] * 3), "`masked_lm_ids` has 3 values, 4"),
    "mixed lengths": (
        lambda: frame(example(random_sequence(random.Random(3), 32, PREDICTIONS))),
        "has 32 values, 24 are wanted",
    ),
    "mask with a hole": (lambda: changed(input_mask=mask("1101")), "`input_mask` is not 1..1 0..0"),
    "mask of twos": (lambda: changed(input_mask=mask("112")), "`input_mask` holds 2 at 2"),
    "length 0": (lambda: changed(input_mask=mask("")), "`input_mask` is all 0"),
    "position outside": (
        lambda: changed(input_mask=mask("111"), input_ids=mask("555"), masked_lm_positions=[3, 0, 0, 0]),
        "`masked_lm_positions` holds 3 at 0, 0 to 2 is allowed",
    ),
    "negative token": (lambda: changed(input_ids=[-1] + [0] * 23), "`input_ids` holds -1 at 0"),
    "token behind the mask": (lambda: changed(input_mask=mask("1"), input_ids=mask("77")), "`input_ids` holds 7 at 1"),
    "half weight": (lambda: changed(masked_lm_weights=[0.5, 0.0, 0.0, 0.0]), "`masked_lm_weights` holds 0.5 at 0"),
    "label 2": (lambda: changed(next_sentence_labels=[2]), "`next_sentence_labels` is 2"),
    "two labels": (lambda: changed(next_sentence_labels=[0, 1]), "`next_sentence_labels` has 2 values"),
    "not an Example": (lambda: frame(b"\xff\xff\xff\xff\xff\xff"), "not a tf.train.Example"),
    "flipped bit": (lambda: flip(changed(), 60), "damaged"),
    "flipped bit in the length": (lambda: flip(changed(), 1), "its length is damaged"),
    "too long": (lambda: frame(b"", claimed_length=2**40), "longer than any legal record"),
}


def flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def refused(error: GaudiBertError, *parts: str) -> None:
    """The message is one line and names what it must."""
    text = str(error)
    assert error.exit_code in (1, 2)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize("kind", list(BAD_RECORDS))
def test_a_bad_record_is_refused_by_file_and_record(tmp_path: Path, kind: str) -> None:
    make, reason = BAD_RECORDS[kind]
    folder = tmp_path / "records"
    folder.mkdir()
    before = [frame(example(good(seed))) for seed in range(BAD)]
    after = [frame(example(good(seed))) for seed in range(RECORDS - BAD - 1)]
    (folder / "a").write_bytes(b"".join(before))
    (folder / "b").write_bytes(b"".join([*before, make(), *after]))
    with pytest.raises(InputError) as caught:
        histogram(folder, tmp_path / "histogram.json", reporter=QUIET)
    offset = sum(len(record) for record in before)
    refused(caught.value, f"{folder / 'b'}: record {BAD} at byte {offset}", reason)
    assert not (tmp_path / "histogram.json").exists()


@pytest.mark.parametrize("cut", [1, 5, 12, 30])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    data = b"".join(frame(example(good(seed))) for seed in range(4))
    last = len(frame(example(good(3))))
    (tmp_path / "part").write_bytes(data[: len(data) - last + cut])
    with pytest.raises(InputError) as caught:
        histogram(tmp_path / "part", tmp_path / "histogram.json", reporter=QUIET)
    refused(caught.value, f"record 3 at byte {len(data) - last}", "cut short")


def test_what_is_not_there_or_no_tfrecord_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"This is a text and not a TFRecord at all.\n" * 10)
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "packed").write_bytes(frame(example({**good(1), "positions": [0], "next_sentence_positions": [0]})))
    for name, reason in {
        "missing": "no such folder or file",
        "empty-folder": "holds no record files",
        "empty": "the file is empty",
        "text": "not a TFRecord file",
        "short": "not a TFRecord file",
        "packed": "this is a packed example",
    }.items():
        with pytest.raises(InputError) as caught:
            histogram(tmp_path / name, tmp_path / "histogram.json", reporter=QUIET)
        refused(caught.value, str(tmp_path / name), reason)
        assert not (tmp_path / "histogram.json").exists()


def test_every_stage_refuses_a_file_that_changed_since_it_was_counted(tmp_path: Path) -> None:
    """The same size, legal records, but not those of the plan."""
    case = make_case(tmp_path, files=3, sequences_per_file=5)
    target = case.records / "part-1"
    original = target.read_bytes()
    payload_size = struct.unpack_from("<Q", original)[0]
    first, rest = original[: payload_size + 16], original[payload_size + 16 :]
    out = tmp_path / "again"
    for data, reason in (
        (rest + first, "crc32c"),
        (original + first, "the plan was made for"),
        (rest, "the plan was made for"),
        (flip(original, len(original) // 2), "damaged"),
    ):
        target.write_bytes(data)
        with pytest.raises(InputError) as caught:
            write(case.records, case.plan, out, reporter=QUIET, workers=1)
        refused(caught.value, str(target), reason)
        assert not (out / "metadata.json").exists()
        in_group = [path for path in out.glob("group-*.json") if "part-1" in path.read_text()]
        assert not in_group
    target.unlink()
    with pytest.raises(InputError, match="part-1 of the plan is missing"):
        write(case.records, case.plan, out, reporter=QUIET)
    target.write_bytes(original)
    (case.records / "part-9").write_bytes(original)
    with pytest.raises(InputError, match=r"part-9: is not in the plan"):
        write(case.records, case.plan, out, reporter=QUIET)
    (case.records / "part-9").unlink()
    write(case.records, case.plan, out, reporter=QUIET)
    assert (out / "metadata.json").read_bytes() == (case.packed / "metadata.json").read_bytes()
