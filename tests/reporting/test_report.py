"""The report: a page that needs nothing but itself, of whatever files are there; damaged ones are named."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.reporting.report import _format_setting, _make_summary_cards, _read_inputs, report
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


def written(folder: Path, without: tuple[str, ...] = ()) -> str:
    """The page of a work folder without these files."""
    report(write_workdir(folder, without))
    return (folder / "report.html").read_text(encoding="utf-8")


def words_of(page: str) -> str:
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    return " ".join(" ".join(checker.words).replace("\u00a0", " ").split())


def test_the_summary(tmp_path: Path) -> None:
    cards = _make_summary_cards(_read_inputs(write_workdir(tmp_path)))
    assert {card.name: (card.value.replace("\u00a0", " "), card.note.replace("\u00a0", " ")) for card in cards} == {
        "Packing factor": ("1.452", "45 sequences in 31 packs"),
        "Realized speed-up": ("1.400", "ratio of packed to padded sequences per second, 96 % of the packing factor"),
        "Efficiency": ("98.51 %", "tokens / slots; 67.9 % before packing"),
        "Above the bound": ("1 pack", "3.33 % above 30, which is proven"),
        "Verified": ("yes", "each of 45 sequences is in the packs exactly once"),
        "Masked-LM accuracy": ("25.0 %", "5.0 times the unigram baseline, 5.0 %"),
        "Next-sentence accuracy": ("70.0 %", "always giving the more frequent answer: 52.0 %"),
        "Accuracy": ("75.0 %", "classification, 12 held-out rows; always the same answer: 25.0 %"),
    }


def test_the_page_is_well_formed_self_contained_and_the_same_again(tmp_path: Path) -> None:
    """Of a folder whose name has to be escaped; a line that a kill cut short is left out."""
    folder = tmp_path / "a<b>&c"
    page = written(folder)
    words = words_of(page)
    assert "a&lt;b&gt;&amp;c" in page
    assert "a<b>" not in page
    assert "do not exist yet" not in words
    assert "masked-LM loss 6.0000 4.5000" in words, "those of the last update"
    pictures = [unquote(picture) for picture in re.findall(r"src='data:image/svg\+xml,([^']*)'", page)]
    assert len(pictures) == page.count("<img") == 7
    assert not any(re.search(r"<script|<image|<link|@import|url\([^#]|href=\"[^#]", picture) for picture in pictures)
    assert all(ElementTree.fromstring(picture).tag.endswith("}svg") for picture in pictures)
    assert not re.search(r"https?:|<script|<link|@import|url\(", re.sub(r"src='data:[^']*'", "", page))
    metrics = folder / "train/metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"update": 4, "ki')
    result = report(folder)
    assert (folder / "report.html").read_text(encoding="utf-8") == page
    assert (result.facts["report"], result.facts["bytes"]) == (str(folder / "report.html"), len(page.encode("utf-8")))
    assert result.facts["Packing factor"] == "1.452 (45 sequences in 31 packs)"


def test_the_task_is_shown_with_its_baseline_its_packs_and_its_speed(tmp_path: Path) -> None:
    """Also alone: weights that were given need no packs of pretraining."""
    others = tuple(name for name in contents() if not name.startswith(("finetune/", "predict/")))
    for folder, without in (("all", ()), ("task", others)):
        words = words_of(written(tmp_path / folder, without))
        assert "do not exist yet" not in words
        assert "Accuracy 75.0 % 25.0 % F1 macro 0.7000" in words
        assert "packing factor 1.452 packs above the proven bound 1 epochs, updates 2, 7" in words
        assert "sequences per second 1,234 (9,876 tokens)" in words
        assert "rows predicted by predict 4,321" in words
        assert "finetune epochs 2" in words.partition("Settings")[2]


def test_settings_are_written_as_people_read_them() -> None:
    values = {"seed": 99_999, "shard_bytes": 100_000, "verify": True, "store": None, "depths": [1, 2], "none": {}}
    expected = "seed: 99999, shard_bytes: 100,000, verify: yes, store: none, depths: 1, 2, none: none"
    assert _format_setting(values) == expected


@pytest.mark.parametrize("name", sampled(sorted(contents()), 4))
def test_any_file_may_be_missing_or_alone(tmp_path: Path, name: str) -> None:
    absent = {"plan.json", "packed/train/metadata.json", "packed/train/verification.json"}
    absent |= {"train/metrics.jsonl", "train/evaluation.json"}
    assert (f"do not exist yet: {name}" in words_of(written(tmp_path / "missing", (name,)))) == (name in absent)
    others = tuple(set(contents()) - {name})
    if name in NOT_ENOUGH:
        with pytest.raises(InputError, match="files that a report needs"):
            written(tmp_path / "alone", others)
    else:
        is_of_a_task = name in {"finetune/metrics.json", "predict/predictions.jsonl"}
        assert ("do not exist yet" in words_of(written(tmp_path / "alone", others))) != is_of_a_task


def test_no_sequence_above_the_bound_is_proven_optimal(tmp_path: Path) -> None:
    folder = write_workdir(tmp_path, without=("packed/train/metadata.json",))
    plan = folder / "plan.json"
    plan.write_text(plan.read_text().replace('"lower_bound": 30', '"lower_bound": 31').replace('"gap": 1', '"gap": 0'))
    cards = [(card.value, card.note) for card in _make_summary_cards(_read_inputs(folder))]
    assert ("0 packs", "31 packs: proven optimal") in cards


NARROW_METADATA = json.dumps({**contents()["packed/train/metadata.json"], "max_sequence_length": 12, "histogram": [1] * 12})
EMPTY_METADATA = json.dumps({**contents()["packed/train/metadata.json"], "histogram": [0] * 13})


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("plan.json", '{"groups": 5}', r"plan\.json"),
        ("packed/train/metadata.json", NARROW_METADATA, r"plan\.json: the plan contains a pack of 13 tokens"),
        ("packed/train/metadata.json", EMPTY_METADATA, "no sequence"),
        ("packed/train/verification.json", "{}", r"verification\.json"),
        ("train/metrics.jsonl", '{"kind": "train"}\n', r"metrics\.jsonl: line 1"),
        ("train/settings.yaml", "a: [", r"settings\.yaml: line 1, column 5"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, named: str) -> None:
    (write_workdir(tmp_path) / name).write_text(content)
    with pytest.raises(InputError, match=named):
        report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_nothing_to_report_on(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing: no such folder"):
        report(tmp_path / "missing")
