"""Estimates of histograms, records and lengths of the user's own: figures, the lines that are printed, what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.reporting.estimate import EstimateResult, estimate_packing_efficiency, list_bundled_histograms
from tests.builders.agree import agree
from tests.builders.histograms import HISTOGRAMS
from tests.builders.reporters import QUIET

SQUAD = HISTOGRAMS / "squad-384.json"


def quick(source: str | Path, **changes) -> EstimateResult:
    return estimate_packing_efficiency(source, **{"depths": ["2"], "algorithms": ["lpfhp"], "reporter": QUIET, **changes})


def test_every_algorithm_at_every_depth(tmp_path: Path) -> None:
    picture = tmp_path / "estimate.svg"
    result = quick(SQUAD, depths=["2", 3, "max"], algorithms=["none", "spfhp", " lpfhp", "sort"], picture=picture)
    rows = {(row.algorithm, row.depth): row for row in result.rows}
    each = [(name, depth) for name in ("spfhp", "lpfhp") for depth in (2, 3, "max")]
    assert list(rows) == [("none", 1), *each, ("sort", 1)]
    agree(result.unpadding[0].packing, 88_641 / 40_631)
    assert [row.max_sequence_length for row in result.length_scan] == [384, 432, 480, 512, 576, 768]
    names = ["estimate", "estimate-histogram", "estimate-mixture", "estimate-scaling"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == names
    assert picture.read_text().startswith("<?xml")
    assert rows["sort", 1].gap is None
    text = "\n".join(result.format_lines(details=True))
    assert all(figure in text for figure in ("40,711", "97.547 %", "times the cost of attention", "2048: 1.2"))
    first_look = [" ".join(line.split()) for line in result.format_lines()]
    assert {"1 2 3 max", "none 44.80 %", "lpfhp 87.60 % 97.74 % 97.74 %", "spfhp 0 516 516"} <= set(first_look)
    assert "proven minimum 88,641 45,335 40,195 40,195" in first_look
    assert first_look[-2].startswith("40,631 packs of depth 3 (lpfhp) replace 88,641 rows, 2.182 times fewer")


def test_shipped_histograms_are_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = quick("squad-384")
    assert (result.source, result.sequences, result.rows[0].packs) == ("squad-384", 88_641, 45_335)
    (tmp_path / "squad-384").mkdir()  # a folder of that name is the user's
    with pytest.raises(InputError, match="squad-384"):
        quick("squad-384")
    assert list(list_bundled_histograms()) == [
        "squad-384",
        *(f"wikipedia-{length}" for length in (128, 384, 512, 1024, 2048)),
    ]


def test_records_are_counted_first(shared_data: Path) -> None:
    result = quick(shared_data / "wiki-sample" / "tfrecord-512")
    assert (result.sequences, result.tokens, result.max_sequence_length) == (4192, 1_692_664, 512)
    assert (result.rows[0].packs, result.rows[0].gap) == (3463, 0)


@pytest.mark.parametrize(
    ("source", "changes", "named"),
    [
        (SQUAD, {"depths": ["0"]}, "'0'"),
        (SQUAD, {"algorithms": ["lpfph"]}, "`lpfhp`"),
        (SQUAD, {"picture": Path("x.pdf")}, "x.pdf"),
        ("missing.json", {}, "missing.json"),
        ("wikipedia-521", {}, "`wikipedia-512`"),
    ],
)
def test_bad_requests(source: str | Path, changes: dict, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        quick(source, **changes)


# --- lengths of the user's own


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt", b"12\n30 7\n511,\n"),
        ("x.json", b" [12, 30, 7, 511]"),
        ("x.csv", b"12\n30\n7\n511\n"),
        ("x.csv", b"id;Length;text\na;12;x\nb;30;y\nc;7;z\nd;511;\n"),
        ("x.npy", np.array([12, 30, 7, 511], np.uint16)),
    ],
)
def test_lengths_of_the_users_own(tmp_path: Path, name: str, content: bytes | np.ndarray) -> None:
    path = tmp_path / name
    np.save(path, content) if isinstance(content, np.ndarray) else path.write_bytes(content)
    result = quick(path, depths=["max"])
    assert (result.sequences, result.tokens, result.max_sequence_length, result.rows[0].packs) == (4, 560, 511, 2)
    assert quick(path, depths=["max"], max_sequence_length=560).rows[0].packs == 1
    with pytest.raises(InputError, match="sequence 4 has 511 tokens"):
        quick(path, max_sequence_length=510)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("x.txt", b"12 0", "length 2 is 0, but must be an integer from 1 to"),
        ("x.json", b"[12, 1.5]", "is 1.5, but"),
        ("x.json", b"[[1], [2]]", "2, 1"),
        ("x.csv", b"a,b\n1,2\n", "a, b"),
        ("x.csv", b"3,4\n1,2\n", "2 columns"),
        ("x.npy", b"nothing", "x.npy"),
    ],
)
def test_what_are_no_lengths(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(named)):
        quick(tmp_path / name)
