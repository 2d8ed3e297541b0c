"""The report: a page that needs nothing but itself, of whatever files are there."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.reporting.inputs import read_inputs
from gaudi_bert.reporting.report import render_page, report, summary_cards
from tests.builders.effort import sampled
from tests.builders.plans import contents, write_workdir

NOT_ENOUGH = {"examples/settings.json", "plan.settings.json", "packed/train/verification.json", "train/settings.yaml"}
NOT_ENOUGH |= {"train/training.json", "finetune/metrics.jsonl", "finetune/settings.yaml"}
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Checker(HTMLParser):
    """Checks that every element is closed in order, and gathers the words."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def plain(words: str) -> str:
    return words.replace("\u00a0", " ")


def words_of(page: str) -> str:
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    return " ".join(" ".join(checker.words).split())


def test_the_summary(tmp_path: Path) -> None:
    cards = summary_cards(read_inputs(write_workdir(tmp_path)))
    assert {card.name: (plain(card.figure), plain(card.note)) for card in cards} == {
        "Packing factor": ("1.452", "45 sequences in 31 packs"),
        "Realized speed-up": ("1.400", "sequences per second, packed compared with padded: 96 % of the factor"),
        "Efficiency": ("98.51 %", "real tokens / slots; 67.9 % unpacked"),
        "Above the bound": ("1 pack", "3.33 % above 30, which is proven"),
        "Verified": ("yes", "each of 45 sequences is there exactly once"),
        "Masked-LM accuracy": ("25.0 %", "5.0 times the unigram baseline, 5.0 %"),
        "Next-sentence accuracy": ("70.0 %", "the more frequent answer alone: 52.0 %"),
        "Accuracy": ("75.0 %", "classification, 12 held-out rows; always the same answer: 25.0 %"),
    }


def test_the_task_is_shown_with_its_baseline_its_packs_and_its_speed(tmp_path: Path) -> None:
    words = plain(words_of(render_page(read_inputs(write_workdir(tmp_path)))))
    assert "Accuracy 75.0 % 25.0 % F1 macro 0.7000" in words
    assert "packing factor 1.452 above the proven bound 1 epochs, updates 2, 7" in words
    assert "sequences per second 1,234 (9,876 real tokens)" in words
    assert "rows answered by predict 4,321" in words
    assert "epochs 2" in words.partition("Settings")[2]


def test_a_task_alone_lacks_nothing(tmp_path: Path) -> None:
    """Weights that were given need no packs of pretraining."""
    others = tuple(name for name in contents() if not name.startswith(("finetune/", "predict/")))
    words = plain(words_of(render_page(read_inputs(write_workdir(tmp_path, without=others)))))
    assert "Not there yet" not in words
    assert "A task" in words
    without = (*others, *(name for name in contents() if name.startswith("finetune/")))
    words = words_of(render_page(read_inputs(write_workdir(tmp_path / "b", without=without))))
    assert "rows answered by predict 4,321" in words


def test_the_page_is_well_formed_and_self_contained(tmp_path: Path) -> None:
    page = render_page(read_inputs(write_workdir(tmp_path)))
    words = words_of(page)
    assert "Not there yet" not in words
    assert "learning_rate 0.001" in words
    pictures = [unquote(picture) for picture in re.findall(r"src='data:image/svg\+xml,([^']*)'", page)]
    assert len(pictures) == page.count("<img") == 7
    assert not any(re.search(r"<script|<image|<link|@import|url\([^#]|href=\"[^#]", picture) for picture in pictures)
    assert all(ElementTree.fromstring(picture).tag.endswith("}svg") for picture in pictures)
    assert not re.search(r"https?:|<script|<link|@import|url\(", re.sub(r"src='data:[^']*'", "", page))
    assert page == render_page(read_inputs(tmp_path))


@pytest.mark.parametrize("name", sampled(sorted(contents()), 4))
def test_any_file_may_be_missing(tmp_path: Path, name: str) -> None:
    words = words_of(render_page(read_inputs(write_workdir(tmp_path, without=(name,)))))
    absent = {"plan.json", "packed/train/metadata.json", "packed/train/verification.json"}
    absent |= {"train/metrics.jsonl", "train/evaluation.json"}
    assert (f"Not there yet: {name}" in words) == (name in absent)


ENOUGH_FOR_A_TASK = {"finetune/metrics.json", "predict/predictions.jsonl"}


@pytest.mark.parametrize("name", sampled(sorted(set(contents()) - NOT_ENOUGH - ENOUGH_FOR_A_TASK), 3))
def test_any_file_may_be_alone(tmp_path: Path, name: str) -> None:
    words = words_of(render_page(read_inputs(write_workdir(tmp_path, without=tuple(set(contents()) - {name})))))
    assert "Not there yet" in words


def test_names_are_escaped(tmp_path: Path) -> None:
    folder = write_workdir(tmp_path / "a<b>&c")
    page = render_page(read_inputs(folder))
    assert "a&lt;b&gt;&amp;c" in page
    assert "a<b>" not in page


def test_no_sequence_above_the_bound_is_proven_optimal(tmp_path: Path) -> None:
    folder = write_workdir(tmp_path, without=("packed/train/metadata.json",))
    plan = folder / "plan.json"
    plan.write_text(plan.read_text().replace('"lower_bound": 30', '"lower_bound": 31').replace('"gap": 1', '"gap": 0'))
    cards = [(card.figure, card.note) for card in summary_cards(read_inputs(folder))]
    assert ("0 packs", "31 packs: proven optimal") in cards


def test_the_page_is_written_and_summed_up(tmp_path: Path) -> None:
    """Twice the same; a line that a kill cut short is left out."""
    result = report(write_workdir(tmp_path))
    page = tmp_path / "report.html"
    assert result.facts["report"] == str(page)
    assert result.facts["bytes"] == page.stat().st_size < 100_000
    assert result.facts["Packing factor"] == "1.452 (45 sequences in 31 packs)"
    before, metrics = page.read_bytes(), tmp_path / "train/metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"update": 4, "ki')
    report(tmp_path)
    assert page.read_bytes() == before


def test_nothing_to_report_on(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        report(tmp_path / "missing")
    with pytest.raises(InputError, match="nothing to report on"):
        report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_seven_cards_leave_no_hole(tmp_path: Path) -> None:
    """The cards of the last row grow to its end: they are flexible boxes that wrap."""
    page = render_page(read_inputs(write_workdir(tmp_path)))
    style = page.partition("</style>")[0].partition("<style>")[2]
    assert re.search(r"\.cards \{[^}]*display: flex; flex-wrap: wrap", style)
    assert re.search(r"\.cards > \* \{ *flex: 1 ", style)
