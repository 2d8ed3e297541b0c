from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.reporting.report import report
from tests.builders.report_work_folder import contents, write_workdir


def test_the_page_is_written_and_summed_up(tmp_path: Path) -> None:
    """Twice the same; a line that a kill cut short is left out."""
    result = report(write_workdir(tmp_path))
    page = tmp_path / "report.html"
    assert result.report == str(page)
    assert result.bytes == page.stat().st_size < 100_000
    assert result.figures["Packing factor"] == "1.452 (45 sequences in 31 packs)"
    before, metrics = page.read_bytes(), tmp_path / "train/metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"update": 4, "ki')
    report(tmp_path)
    assert page.read_bytes() == before


NARROW_METADATA = json.dumps({**contents()["packed/train/metadata.json"], "max_sequence_length": 12, "histogram": [1] * 12})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("plan.json", "{", r"plan\.json: not a JSON file"),
        ("train/metrics.jsonl", '{"a": 1\n{"b": 2}\n', r"metrics\.jsonl: line 1: not a JSON file"),
        ("train/settings.yaml", "a: [", r"settings\.yaml: line 1, column 5: not valid YAML"),
        ("plan.json", '{"groups": 5}', r"plan\.json: is not as this version writes it"),
        ("packed/train/metadata.json", "[]", r"metadata\.json: is not as this version writes it"),
        ("train/metrics.jsonl", '{"kind": "train"}\n', r"metrics\.jsonl: line 1: is not as this version writes it"),
        ("examples/examples.json", '{"splits": {}}', r"examples\.json: is not as .* `vocabulary` is missing"),
        (
            "histogram.json",
            '{"max_sequence_length": 3, "counts": [1, -1, 0]}',
            r"histogram\.json: is not as .* `counts\.1` = -1",
        ),
        ("histogram.json", '{"max_sequence_length": 3, "counts": [1]}', r"histogram\.json: 1 counts for lengths 1 to 3"),
        ("train/evaluation.json", '{"masked_lm_loss": NaN}', r"evaluation\.json: is not as"),
        ("packed/train/metadata.json", NARROW_METADATA, r"plan\.json: a pack of 13 tokens, the histogram's rows have 12"),
        ("packed/train/verification.json", "{}", r"verification\.json: is not as this version writes it"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (write_workdir(tmp_path) / name).write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        report(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_nothing_to_report_on(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        report(tmp_path / "missing")
    with pytest.raises(InputError, match="nothing to report on"):
        report(tmp_path)
    assert not (tmp_path / "report.html").exists()
