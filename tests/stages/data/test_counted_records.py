from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.metadata import VocabularyInfo
from gaudi_bert.common.errors import InputError
from gaudi_bert.stages.data.counted_records import read_histograms


def file_entry(name: str, rows: list[list[int]]) -> dict[str, Any]:
    return {
        "name": name,
        "bytes": 100,
        "crc32c": 5,
        "sequences": sum(row[2] for row in rows),
        "tokens": sum(row[0] * row[2] for row in rows),
        "counts": rows,
    }


def content(*files: dict[str, Any], length: int = 4) -> dict[str, Any]:
    counts = [0] * length
    for file in files:
        for row in file["counts"]:
            counts[row[0] - 1] += row[2]
    return {
        "max_sequence_length": length,
        "max_predictions": 2,
        "counts": counts,
        "files": list(files),
        "vocabulary": {"size": 9, "sha256": "ab"},
    }


def write(folder: Path, name: str, value: Any) -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


ONE = file_entry("a.tfrecord", [[2, 1, 3], [4, 2, 1]])
TWO = file_entry("b.tfrecord", [[4, 1, 2]])


def test_several_are_merged_and_are_the_same_as_one(tmp_path: Path) -> None:
    parts = [write(tmp_path, "1.json", content(TWO)), write(tmp_path, "0.json", content(ONE))]
    merged = read_histograms(parts)
    whole = read_histograms([write(tmp_path, "all.json", content(ONE, TWO))])
    assert merged.sha256 == whole.sha256 == read_histograms(parts[::-1]).sha256
    assert merged.histogram.counts.tolist() == [0, 3, 0, 3]
    assert merged.histogram.max_masked is not None
    assert merged.histogram.max_masked.tolist() == [0, 1, 0, 2]
    assert merged.files is not None
    assert [file.name for file in merged.files] == ["a.tfrecord", "b.tfrecord"]
    assert (merged.max_predictions, merged.vocabulary) == (2, VocabularyInfo(size=9, sha256="ab"))


def test_counts_alone_are_enough(tmp_path: Path) -> None:
    records = read_histograms([write(tmp_path, "h.json", {"name": "x", "max_sequence_length": 3, "counts": [1, 0, 2]})])
    assert records.files is None
    assert records.max_predictions is None
    assert records.histogram.max_masked is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not a JSON file"),
        ([1, 2], "is not as this version writes it"),
        ({"counts": [1]}, "`max_sequence_length` is missing"),
        ({"max_sequence_length": 2, "counts": [0, 0]}, "holds no sequence"),
        ({"max_sequence_length": 3, "counts": [1, 1]}, "2 counts for lengths 1 to 3"),
        ({"max_sequence_length": 2, "counts": [1, -1]}, "`counts.1` = -1"),
        ({"max_sequence_length": 2, "counts": [1, True]}, "`counts.1` = True"),
        ({**content(ONE), "max_predictions": 0}, "`max_predictions` = 0"),
        ({**content(ONE), "counts": [0, 3, 0, 2]}, "length 4 is counted 2 times in all, but 1 times in the files"),
        (content({**ONE, "sequences": 5}), "the counts of a.tfrecord do not add up to its 5 sequences"),
        (content({**ONE, "bytes": -1}), "`files.0.bytes` = -1"),
        (content(ONE, ONE), "a.tfrecord is counted twice"),
        ({**content(ONE), "files": [{"name": "a"}]}, "`files.0.bytes` is missing"),
        ({**content(ONE), "files": [{**ONE, "counts": [[2, 1]]}]}, "must be rows of whole numbers"),
        ({**content(ONE), "files": [{**ONE, "counts": [[2, 1, 3], [4]]}]}, "must be rows of whole numbers"),
        ({**content(ONE), "files": [{**ONE, "counts": [[2, 1, 3.5]]}]}, "must be rows of whole numbers"),
        ({**content(ONE), "files": [{**ONE, "counts": [[2, 1, 10**30]]}]}, "must be rows of whole numbers"),
        ({**content(ONE), "files": [{**ONE, "counts": [[2, -1, 3]]}]}, "a.tfrecord has a negative count"),
        ({**content(ONE), "files": [{**ONE, "sequences": 1, "counts": [[9, 1, 1]]}]}, "a length of a.tfrecord is 9"),
        ({**content(ONE), "files": ["abc"]}, "`files.0`"),
        ({**content(ONE), "files": 3}, "`files` = 3"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, value: Any, message: str) -> None:
    path = write(tmp_path, "histogram.json", value)
    with pytest.raises(InputError) as caught:
        read_histograms([path])
    assert message in str(caught.value)
    assert "histogram.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_like_histograms_are_merged(tmp_path: Path) -> None:
    one = write(tmp_path, "one.json", content(ONE))
    for name, value, message in (
        ("length", content(file_entry("b", [[4, 1, 2]]), length=5), "max_sequence_length is 5, but 4 in"),
        ("predictions", {**content(TWO), "max_predictions": 3}, "max_predictions is 3, but 2 in"),
        ("vocabulary", {**content(TWO), "vocabulary": None}, "vocabulary is None"),
        ("files", {**content(TWO), "files": None}, "has no counts per file while others have"),
        ("same", content(ONE), "a.tfrecord: is counted twice"),
    ):
        other = write(tmp_path, f"{name}.json", value)
        with pytest.raises(InputError, match=message):
            read_histograms([one, other])
    with pytest.raises(InputError, match=r"no histogram\.json is given"):
        read_histograms([])
    with pytest.raises(InputError, match="cannot read"):
        read_histograms([tmp_path / "missing.json"])
