"""The histogram stage against counting one value at a time; bad records and foreign files are one line that names file and
record; and the plan that is made of histograms."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.histogram import HistogramFile
from gaudi_bert.artefacts.plan import Plan
from gaudi_bert.artefacts.results import PlainResult
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.plan import count_records, plan_packs
from gaudi_bert.tfrecords.verify import verify_records
from gaudi_bert.tfrecords.write import pack_records
from tests.builders.agree import agree
from tests.builders.histograms import HISTOGRAMS
from tests.builders.packing_case import write_tfrecord
from tests.builders.reporters import Listener, a_run
from tests.builders.unreadable import open_folder, unreadable
from tests.oracles.wire import crc32c, example, frame, random_sequence


def write_files(folder: Path, counts: list[int], max_sequence_length: int, max_predictions: int, seed: int = 1) -> dict:
    """Files of random sequences; what is in each, by name."""
    rng = random.Random(seed)
    content = {
        f"part-{number:03d}": [random_sequence(rng, max_sequence_length, max_predictions) for _ in range(count)]
        for number, count in enumerate(counts)
    }
    for name, sequences in content.items():
        write_tfrecord(folder / name, sequences)
    return content


def expected_counts(sequences: list[dict]) -> list[list[int]]:
    pairs = Counter((sum(sequence["input_mask"]), int(sum(sequence["masked_lm_weights"]))) for sequence in sequences)
    return [[length, masked, count] for (length, masked), count in sorted(pairs.items())]


@pytest.mark.parametrize(
    ("max_sequence_length", "max_predictions", "counts"),
    [(16, 1, [1]), (17, 16, [40, 1, 7]), (128, 20, [500, 301]), (512, 77, [800]), (8192, 1300, [3, 5])],
)
def test_every_sequence_is_counted(
    tmp_path: Path, max_sequence_length: int, max_predictions: int, counts: list[int]
) -> None:
    """The largest file has 1.6 MB: records lie across ends of pieces, and the CRC of the file is joined from theirs."""
    content = write_files(tmp_path / "records", counts, max_sequence_length, max_predictions)
    summary = count_records(tmp_path / "records", tmp_path / "histogram.json", a_run()).content
    written = json.loads((tmp_path / "histogram.json").read_text())
    assert written["max_sequence_length"] == max_sequence_length
    assert written["max_predictions"] == max_predictions
    assert [entry["name"] for entry in written["files"]] == sorted(content)
    lengths = Counter(sum(sequence["input_mask"]) for sequences in content.values() for sequence in sequences)
    assert written["counts"] == [lengths[length] for length in range(1, max_sequence_length + 1)]
    for entry in written["files"]:
        data = (tmp_path / "records" / entry["name"]).read_bytes()
        assert (entry["bytes"], entry["crc32c"]) == (len(data), crc32c(data))
        assert entry["counts"] == expected_counts(content[entry["name"]])
        assert entry["sequences"] == len(content[entry["name"]])
    assert summary.sequences == sum(counts)
    assert summary.tokens == written["tokens"] == sum(length * count for length, count in lengths.items())
    assert HistogramFile.read_and_merge([tmp_path / "histogram.json"]).sequences == sum(counts)


def test_shards_merge_to_the_whole_and_threads_do_not_matter(tmp_path: Path) -> None:
    records, out = tmp_path / "records", tmp_path / "whole.json"
    write_files(records, [11, 12, 13, 14, 15, 16, 17], 32, 5)
    count_records(records, out, a_run(workers=1))
    count_records(records, tmp_path / "threads.json", a_run(workers=3))
    assert out.read_bytes() == (tmp_path / "threads.json").read_bytes()
    parts = [tmp_path / f"part-{number}.json" for number in range(3)]
    for number, part in enumerate(parts):
        count_records(records, part, a_run(part=(number, 3)))
    merged, whole = HistogramFile.read_and_merge(parts[::-1]), HistogramFile.read_and_merge([out])
    assert merged.sha256 == whole.sha256
    assert merged.compute_max_masked_positions().tolist() == whole.compute_max_masked_positions().tolist()
    assert [file.name for file in merged.files or ()] == sorted(file.name for file in whole.files or ())
    assert isinstance(count_records(records, tmp_path / "none.json", a_run(part=(7, 8))), PlainResult)
    assert not (tmp_path / "none.json").exists()
    assert count_records(records, out, a_run()).skipped
    write_files(records, [9] * 8, 32, 5)
    with pytest.raises(InputError, match=r"files\.part-000: .*--overwrite"):
        count_records(records, out, a_run())


def test_the_vocabulary_beside_the_records_is_noted_and_one_of_other_records_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "train", [5], 16, 3)
    (tmp_path / "vocab.txt").write_text("wo\u2028rd\x85\n" * 30522, encoding="utf-8", newline="\n")
    vocabulary = count_records(tmp_path / "train", tmp_path / "histogram.json", a_run()).content.vocabulary
    assert (vocabulary.size, len(vocabulary.sha256)) == (30522, 64)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    with pytest.raises(InputError, match=r"vocab\.txt: the vocabulary has 2 tokens, but .*part-000 contains the token id"):
        count_records(tmp_path / "train", tmp_path / "other.json", a_run())


def test_other_features_are_said_to_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sequence = {**random_sequence(random.Random(1), 16, 3), "document_number": [7]}
    (tmp_path / "part").write_bytes(frame(example(sequence)))
    count_records(tmp_path / "part", tmp_path / "histogram.json", a_run(reporter=Reporter()))
    assert "document_number" in capsys.readouterr().err


# --- histogram.json as it is read


def file_entry(name: str, rows: list[list[int]]) -> dict[str, Any]:
    sums = {"sequences": sum(row[2] for row in rows), "tokens": sum(row[0] * row[2] for row in rows)}
    return {"name": name, "bytes": 100, "crc32c": 5, **sums, "counts": rows}


def content(*files: dict[str, Any], length: int = 4, predictions: int = 2) -> dict[str, Any]:
    counts = [0] * length
    for file in files:
        for row in file["counts"]:
            counts[row[0] - 1] += row[2]
    sizes = {"max_sequence_length": length, "max_predictions": predictions}
    return {**sizes, "counts": counts, "files": list(files), "vocabulary": {"size": 9, "sha256": "ab"}}


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


ONE = file_entry("a.tfrecord", [[2, 1, 3], [4, 2, 1]])
TWO = file_entry("b.tfrecord", [[4, 1, 2]])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"max_sequence_length": 2, "counts": [0, 0]}, "contains no sequences"),
        ({"max_sequence_length": 3, "counts": [1, 1]}, "expected 3 counts, for lengths 1 to 3, found 2"),
        ({**content(ONE), "counts": [0, 3, 0, 2]}, "length 4 occurs 2 times in total, but 1 times in the files"),
        (content({**ONE, "sequences": 5}), "the counts of a.tfrecord do not add up to the stated 5 sequences"),
        ({**content(ONE), "tokens": 11}, "tokens is 11, but the counts add up to 10"),
        (content(ONE, ONE), "a.tfrecord was counted twice"),
        ({**content(ONE), "files": [{**ONE, "counts": [[2, 1, 3], [4]]}]}, "must be a list of rows of three integers"),
        ({**content(ONE), "files": [{**ONE, "counts": [[2, -1, 3]]}]}, "a.tfrecord contains a negative count"),
        (
            {**content(ONE), "files": [{**ONE, "counts": [[2, 9, 3], [4, 2, 1]]}]},
            "a masked count of a.tfrecord must be",
        ),
        (
            content(ONE) | {"files": [{**ONE, "sequences": 1, "tokens": 9, "counts": [[9, 1, 1]]}]},
            "a.tfrecord must be between 1 and 4, but is 9",
        ),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"histogram.json: .*{re.escape(message)}"):
        HistogramFile.read_and_merge([write_json(tmp_path / "histogram.json", value)])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (content(file_entry("b", [[4, 1, 2]]), length=5), "max_sequence_length is 5, but 4 in"),
        ({**content(TWO), "max_predictions": 3}, "max_predictions is 3, but 2 in"),
        ({**content(TWO), "vocabulary": None}, "vocabulary is None"),
        ({**content(TWO), "files": None}, "the histogram has no counts per file, but others have"),
    ],
    ids=["length", "predictions", "vocabulary", "files"],
)
def test_only_like_histograms_are_merged(tmp_path: Path, value: Any, message: str) -> None:
    one, other = write_json(tmp_path / "one.json", content(ONE)), write_json(tmp_path / "other.json", value)
    with pytest.raises(InputError, match=message):
        HistogramFile.read_and_merge([one, other])


# --- bad input: one line with file and record, and nothing written that looks finished


def refused_by_histogram(records: Path | str, out: Path, *parts: str) -> None:
    """In one line that names what it must, and nothing is written."""
    with pytest.raises(InputError) as caught:
        count_records(records, out, a_run())
    for part in parts:
        assert part in str(caught.value)
    assert not out.exists()


PACK = example({**random_sequence(random.Random(1), 24, 4), "positions": [0], "next_sentence_positions": [0]})
TAR = bytes(257) + b"ustar" + bytes(250)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("missing", None, "the path does not exist"),
        ("empty", b"", "the file is empty"),
        ("text", b"This is a text and not a TFRecord at all.\n" * 10, "expected a TFRecord file"),
        ("none", gzip.compress(b""), "contains no records"),
        ("packed", frame(PACK), "expected an unpacked record, found a packed one"),
        # Of other tools, with the way in.
        ("shard-000.tar.gz", gzip.compress(TAR), "a tar archive, probably of WebDataset"),
        ("data.idx", b"MMIDIDX\x00\x00" + bytes(30), "a file of a Megatron data set"),
        ("table.arrow", b"ARROW1\0\0" + bytes(40), "an Arrow table; pass the table itself to `gaudi-bert pack`"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_is_not_there_or_no_record_is_named(tmp_path: Path, name: str, data: bytes | None, reason: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    refused_by_histogram(tmp_path / name, tmp_path / "histogram.json", f"{tmp_path / name}: ", reason)


def test_a_folder_without_records_is_named(tmp_path: Path) -> None:
    refused_by_histogram(tmp_path, tmp_path / "histogram.json", "contains no record files")


def damage(folder: Path, numbers: list[int]) -> None:
    """Three kinds of damage, by turns: no content, cut short, a flipped bit."""
    for number in numbers:
        path = folder / f"part-{number:03d}"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes([b"", data[: len(data) // 2], data][number % 3])


def test_one_pass_names_all_bad_files(tmp_path: Path) -> None:
    write_files(tmp_path / "records", [3] * 40, 16, 3)
    damage(tmp_path / "records", [0, 5, 7, *range(10, 40)])
    told = Listener()
    with pytest.raises(InputError, match=r"33 files \(part-000, .*, part-026 and 13 more\) of 40 cannot be read"):
        count_records(tmp_path / "records", tmp_path / "histogram.json", a_run(reporter=told))
    reasons = [line for line in told.lines if "/part-" in line]
    assert len(reasons) == 20
    assert "part-000: the file is empty; remove it" in reasons[0]
    assert "part-005: record 1 at byte" in reasons[1]
    assert not (tmp_path / "histogram.json").exists()


def test_bad_files_are_left_out_on_request_and_kept_in_mind(tmp_path: Path) -> None:
    records, packed, names = tmp_path / "records", tmp_path / "packed", ["part-000", "part-001", "part-005"]
    write_files(records, [9] * 7, 16, 3)
    damage(records, [0, 1, 5])
    made = pack_records(records, packed, PackingSettings(), a_run(), on_bad_file="skip", verify=True)
    assert (made.written.content.sequences, made.verified.content.bad_files) == (9 * 4, 3)
    for name in ("packed/metadata.json", "packed-plan/plan.json", "packed-plan/histogram.json"):
        stored = json.loads((tmp_path / name).read_text())["bad_files"]
        known = [(each["name"], each["bytes"], each["crc32c"]) for each in stored]
        assert known == [(name, len(data), crc32c(data)) for name in names for data in [(records / name).read_bytes()]]
    damaged = (records / "part-001").read_bytes()
    (records / "part-001").unlink()
    refused_by_verify(records, packed, "part-001 was skipped as bad, but is now missing")
    (records / "part-001").write_bytes(damaged[:-1])
    refused_by_verify(records, packed, "part-001: the file was skipped as bad, but has changed since")
    shutil.copy(records / "part-002", records / "part-001")
    stored = json.loads((packed / "metadata.json").read_text())
    data = (records / "part-001").read_bytes()
    stored["bad_files"][1] |= {"bytes": len(data), "crc32c": crc32c(data)}
    (packed / "metadata.json").write_text(json.dumps(stored))
    refused_by_verify(records, packed, "part-001: the file was skipped as bad, but is readable")
    with pytest.raises(InputError, match="no file remains to pack"):
        count_records(records / "part-00[05]", tmp_path / "histogram.json", a_run(), on_bad_file="skip")


def test_a_file_without_permission_is_a_bad_file(tmp_path: Path) -> None:
    write_files(tmp_path / "records", [9] * 3, 16, 3)
    count_records(tmp_path / "records", tmp_path / "histogram.json", a_run())
    with open_folder() as folder:
        records = shutil.copytree(tmp_path / "records", folder / "records")
        with unreadable(records / "part-001"):
            with pytest.raises(InputError, match="part-001: cannot read: Permission denied"):
                count_records(records, folder / "histogram.json", a_run())
            found = count_records(records, folder / "histogram.json", a_run(), on_bad_file="skip").content
    assert (found.sequences, [file.name for file in found.bad_files]) == (18, ["part-001"])


def refused_by_verify(records: Path, packed: Path, reason: str) -> None:
    with pytest.raises(FailedError, match=reason):
        verify_records(records, packed, a_run())


def test_files_of_two_sizes_are_both_named(tmp_path: Path) -> None:
    """The first file is the odd one, and it is named as such."""
    records = tmp_path / "records"
    write_files(records, [2], 12, 3)
    (records / "part-000").rename(records / "odd")
    write_files(records, [2] * 5, 16, 3)
    told = r"12 input_ids and 3 masked_lm_positions in 1 file \(odd\), 16 .* in 5 files \(part-000, .*and 2 more\); select"
    for choice in ("stop", "skip"):
        with pytest.raises(InputError, match=told):
            count_records(records, tmp_path / "histogram.json", a_run(), on_bad_file=choice)


# --- the plan


def histogram(files: int, sequences: int, length: int = 16, part: slice = slice(None)) -> dict[str, Any]:
    """Files of sequences of all lengths, or a part of them; a fifth of the positions are masked, at least one."""
    entries = []
    for number in range(files)[part]:
        rows = [[size, max(1, size // 5), sequences // length + (size + number) % 3] for size in range(3, length + 1)]
        entries.append({**file_entry(f"part-{number:05d}.tfrecord", rows), "bytes": 1000, "crc32c": number})
    return content(*entries, length=length, predictions=3)


def settings(**changes: Any) -> PackingSettings:
    return PackingSettings.model_validate({"group_sequences": 1000, "algorithm": "lpfhp", **changes})


def test_a_plan_holds_what_the_contract_says(tmp_path: Path) -> None:
    source = histogram(files=5, sequences=300)
    result = plan_packs([write_json(tmp_path / "histogram.json", source)], tmp_path / "plan.json", settings(), a_run())
    made = json.loads((tmp_path / "plan.json").read_text())
    assert (made["format_version"], made["algorithm"], made["depth"], made["seed"]) == (2, "lpfhp", 3, 12345)
    assert (made["max_sequence_length"], made["max_predictions"], made["masked_slots"]) == (16, 3, 6)
    files = sorted((file for group in made["groups"] for file in group["files"]), key=lambda file: file["name"])
    assert [file["name"] for file in files] == [file["name"] for file in source["files"]]
    assert [file["crc32c"] for file in files] == [0, 1, 2, 3, 4]
    assert len(made["groups"]) == 2
    covered = [0] * 16
    for group in made["groups"]:
        assert sum(count for _, count in group["strategies"]) == group["packs"] >= group["lower_bound"]
        for strategy, count in group["strategies"]:
            for length in strategy:
                covered[length - 1] += count
    assert covered == source["counts"]
    assert result.content.as_json() == made["totals"]
    agree(result.content.efficiency, 1 - result.content.padding_tokens / (16 * result.content.packs))
    agree(result.content.packing_factor, result.content.sequences / result.content.packs)
    more = plan_packs([tmp_path / "histogram.json"], tmp_path / "more.json", settings(masked_slots=9), a_run())
    assert more.content.masked_slots == 9


def test_finished_is_skipped_and_other_settings_and_histograms_are_refused(tmp_path: Path) -> None:
    source, out = write_json(tmp_path / "histogram.json", histogram(2, 100)), tmp_path / "plan.json"
    first = plan_packs([source], out, settings(), a_run())
    again = plan_packs([source], out, settings(), a_run())
    assert (again.skipped, again.content) == (True, first.content)
    with pytest.raises(InputError, match=r"depth: 3 in the file, 4 now"):
        plan_packs([source], out, settings(depth=4), a_run())
    write_json(source, histogram(3, 100))
    with pytest.raises(InputError, match="histogram_sha256"):
        plan_packs([source], out, settings(), a_run())


def test_counts_alone_are_planned_and_said_not_to_be_writable(tmp_path: Path) -> None:
    heard = io.StringIO()
    result = plan_packs([HISTOGRAMS / "squad-384.json"], tmp_path / "plan.json", settings(), a_run(reporter=Reporter(heard)))
    made = json.loads((tmp_path / "plan.json").read_text())
    assert result.content.packs == 40_631
    assert made["writable"] is False
    assert (made["groups"][0]["files"], made["masked_slots"]) == ([], None)
    assert "no counts per file" in heard.getvalue()


def test_depth_max_stores_the_depth_that_is_used(tmp_path: Path) -> None:
    source = write_json(tmp_path / "histogram.json", histogram(2, 300))
    result = plan_packs([source], tmp_path / "plan.json", settings(depth="max"), a_run())
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["depth"] == result.content.depth_used < 16
    assert made["depth"] == max(len(strategy) for group in made["groups"] for strategy, _ in group["strategies"])
    assert made["masked_slots"] == 3 + made["depth"]


def test_the_plan_of_many_groups_does_not_depend_on_how_they_were_counted(tmp_path: Path) -> None:
    many = [write_json(tmp_path / f"{n}.json", histogram(150, 20, part=slice(n, None, 3))) for n in range(3)]
    chosen = settings(group_sequences=22)  # each file is a group
    totals = plan_packs(many, tmp_path / "a.json", chosen, a_run()).content
    whole = write_json(tmp_path / "histogram.json", histogram(150, 20))
    for histograms, workers in ((many[::-1], 3), ([whole], 1)):
        plan_packs(histograms, tmp_path / "b.json", chosen, a_run(workers=workers, overwrite=True))
        assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    content = Plan.read(tmp_path / "a.json")
    strategies = {strategy for group in content.groups for strategy, _ in group.strategies}
    assert (
        (totals.groups, totals.strategies_used)
        == (150, len(strategies))
        == (len(content.groups), len(content.strategy_counts))
    )
