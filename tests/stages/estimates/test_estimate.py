from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.estimates.estimate import estimate
from gaudi_bert.stages.estimates.shipped_histograms import shipped_histograms
from tests.builders.histograms import HISTOGRAMS

SQUAD = HISTOGRAMS / "squad-384.json"
QUIET = Reporter(quiet=True)


def test_every_algorithm_at_every_depth(tmp_path: Path) -> None:
    picture = tmp_path / "estimate.svg"
    result = estimate(
        SQUAD, depths=["2", 3, "max"], algorithms=["none", "spfhp", " lpfhp", "sort"], picture=picture, reporter=QUIET
    )
    rows = {(row.algorithm, row.depth): row for row in result.rows}
    assert list(rows) == [
        ("none", 1),
        *((name, depth) for name in ("spfhp", "lpfhp") for depth in (2, 3, "max")),
        ("sort", 1),
    ]
    assert rows["spfhp", 3].packs == 40_711
    assert rows["spfhp", 3].gap == 40_711 - 40_195
    assert rows["lpfhp", 2].gap == 0
    assert result.unpadding.rows[0].packing == pytest.approx(88_641 / 40_631)
    assert [row.max_sequence_length for row in result.length_scan] == [384, 432, 480, 512, 576, 768]
    names = ["estimate", "estimate-histogram", "estimate-mixture", "estimate-scaling"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == names
    assert picture.read_text().startswith("<?xml")


def test_sorted_batches_alone() -> None:
    result = estimate(SQUAD, depths=["max"], algorithms=["sort"], reporter=QUIET)
    assert [row.gap for row in result.rows] == [None]


def test_shipped_histograms_are_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = estimate("squad-384", depths=["2"], algorithms=["lpfhp"], reporter=QUIET)
    assert (result.source, result.sequences, result.rows[0].packs) == ("squad-384", 88_641, 45_335)
    (tmp_path / "squad-384").mkdir()  # a folder of that name is the user's
    with pytest.raises(InputError, match="squad-384"):
        estimate("squad-384", depths=["2"], algorithms=["lpfhp"], reporter=QUIET)


def test_the_six_shipped_histograms() -> None:
    assert list(shipped_histograms()) == [
        "squad-384",
        "wikipedia-128",
        "wikipedia-384",
        "wikipedia-512",
        "wikipedia-1024",
        "wikipedia-2048",
    ]


def test_records_are_counted_first(shared_data: Path) -> None:
    folder = shared_data / "wiki-sample" / "tfrecord-512"
    result = estimate(folder, depths=["2"], algorithms=["lpfhp"], reporter=QUIET)
    assert (result.sequences, result.tokens, result.max_sequence_length) == (4192, 1_692_664, 512)
    assert (result.rows[0].packs, result.rows[0].gap) == (3463, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": ["0"]}, "depth '0': write whole numbers from 1, or `max`"),
        ({"depths": ["x"]}, "depth 'x'"),
        ({"algorithms": ["lpfph"]}, "algorithm `lpfph` is unknown; did you mean `lpfhp`"),
        ({"picture": Path("x.pdf")}, "written as .png or .svg"),
        ({"source": "missing.json"}, "cannot read"),
        ({"source": "wikipedia-521"}, "there is no such file or folder; did you mean `wikipedia-512`"),
    ],
)
def test_bad_requests(changes: dict, message: str) -> None:
    arguments = {"source": SQUAD, "depths": ["2"], "algorithms": ["lpfhp"], **changes}
    with pytest.raises(InputError) as caught:
        estimate(arguments.pop("source"), reporter=QUIET, **arguments)
    assert message in str(caught.value)
