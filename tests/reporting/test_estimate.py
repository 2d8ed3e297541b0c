"""Estimates of histograms, tables and rows: figures, the lines that are printed, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.reporting.estimate import estimate, shipped_histograms
from tests.builders.agree import agree
from tests.builders.histograms import HISTOGRAMS
from tests.builders.reporters import QUIET

SQUAD = HISTOGRAMS / "squad-384.json"


def test_every_algorithm_at_every_depth(tmp_path: Path) -> None:
    picture = tmp_path / "estimate.svg"
    result = estimate(
        SQUAD, depths=["2", 3, "max"], algorithms=["none", "spfhp", " lpfhp", "sort"], picture=picture, reporter=QUIET
    )
    rows = {(row.algorithm, row.depth): row for row in result.rows}
    each = [(name, depth) for name in ("spfhp", "lpfhp") for depth in (2, 3, "max")]
    assert list(rows) == [("none", 1), *each, ("sort", 1)]
    agree(result.unpadding.rows[0].packing, 88_641 / 40_631)
    assert [row.max_sequence_length for row in result.length_scan] == [384, 432, 480, 512, 576, 768]
    names = ["estimate", "estimate-histogram", "estimate-mixture", "estimate-scaling"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == names
    assert picture.read_text().startswith("<?xml")
    assert estimate(SQUAD, depths=["max"], algorithms=["sort"], reporter=QUIET).rows[0].gap is None


def test_shipped_histograms_are_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = estimate("squad-384", depths=["2"], algorithms=["lpfhp"], reporter=QUIET)
    assert (result.source, result.sequences, result.rows[0].packs) == ("squad-384", 88_641, 45_335)
    (tmp_path / "squad-384").mkdir()  # a folder of that name is the user's
    with pytest.raises(InputError, match="squad-384"):
        estimate("squad-384", depths=["2"], algorithms=["lpfhp"], reporter=QUIET)
    assert list(shipped_histograms()) == ["squad-384", *(f"wikipedia-{length}" for length in (128, 384, 512, 1024, 2048))]


def test_records_are_counted_first(shared_data: Path) -> None:
    folder = shared_data / "wiki-sample" / "tfrecord-512"
    result = estimate(folder, depths=["2"], algorithms=["lpfhp"], reporter=QUIET)
    assert (result.sequences, result.tokens, result.max_sequence_length) == (4192, 1_692_664, 512)
    assert (result.rows[0].packs, result.rows[0].gap) == (3463, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": ["0"]}, "depth '0': write integers from 1, or `max`"),
        ({"depths": ["x"]}, "depth 'x'"),
        ({"algorithms": ["lpfph"]}, "algorithm `lpfph` is unknown; did you mean `lpfhp`"),
        ({"picture": Path("x.pdf")}, "written as .png or .svg"),
        ({"source": "missing.json"}, "cannot read"),
        ({"source": "wikipedia-521"}, "no such file or folder; did you mean `wikipedia-512`"),
    ],
)
def test_bad_requests(changes: dict, message: str) -> None:
    arguments = {"source": SQUAD, "depths": ["2"], "algorithms": ["lpfhp"], **changes}
    with pytest.raises(InputError) as caught:
        estimate(arguments.pop("source"), reporter=QUIET, **arguments)
    assert message in str(caught.value)


# --- lengths of the user's own


# --- the lines


def test_two_small_tables_and_a_conclusion() -> None:
    result = estimate("squad-384", depths=[2, 3, "max"], algorithms=["none", "spfhp", "lpfhp"], reporter=QUIET)
    text = [" ".join(line.split()) for line in result.lines()]
    assert text == [
        "squad-384: 88,641 sequences of up to 384 tokens",
        "One per row, 44.80 % of the slots hold tokens; the tokens alone need 39,713 packs.",
        "",
        "Share of slots that hold tokens, by the most sequences that a pack may hold:",
        "1 2 3 max",
        "none 44.80 %",
        "spfhp 87.60 % 97.55 % 97.55 %",
        "lpfhp 87.60 % 97.74 % 97.74 %",
        "",
        "Packs above the proven minimum:",
        "none 0",
        "spfhp 0 516 516",
        "lpfhp 0 436 436",
        "proven minimum 88,641 45,335 40,195 40,195",
        "",
        "40,631 packs of depth 3 (lpfhp) replace 88,641 rows, 2.182 times fewer; the proven minimum is 40,195.",
    ]
    widths = {len(line) for line in result.lines()[5:8] if "max" in line or "%" in line}
    assert max(widths) <= 80


def test_details_have_every_row_other_lengths_and_unpadding() -> None:
    result = estimate("squad-384", depths=[3, "max"], algorithms=["spfhp", "sort"], reporter=QUIET)
    text = "\n".join(result.lines(details=True))
    for expected in ("88,641 sequences", "40,711", "97.547 %", "attention x", "2048: 1.2"):
        assert expected in text
    assert "sort: padded to the longest of a batch, " in "\n".join(result.lines())
