"""What the report reads: damaged files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.reporting.report import report
from tests.builders.plans import contents, write_workdir

NARROW_METADATA = json.dumps({**contents()["packed/train/metadata.json"], "max_sequence_length": 12, "histogram": [1] * 12})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("plan.json", "{", r"plan\.json: not a JSON file"),
        ("plan.json", '{"groups": 5}', r"plan\.json: is not as"),
        ("packed/train/metadata.json", "[]", r"metadata\.json: is not as"),
        ("packed/train/metadata.json", NARROW_METADATA, r"plan\.json: a pack of 13 tokens, the histogram's rows have 12"),
        ("packed/train/verification.json", "{}", r"verification\.json: is not as"),
        ("train/metrics.jsonl", '{"a": 1\n{"b": 2}\n', r"metrics\.jsonl: line 1: not a JSON file"),
        ("train/metrics.jsonl", '{"kind": "train"}\n', r"metrics\.jsonl: line 1: is not as"),
        ("train/settings.yaml", "a: [", r"settings\.yaml: line 1, column 5: not valid YAML"),
        ("train/evaluation.json", '{"masked_lm_loss": NaN}', r"evaluation\.json: is not as"),
        ("examples/examples.json", '{"splits": {}}', r"examples\.json: is not as .* `vocabulary` is missing"),
        (
            "histogram.json",
            '{"max_sequence_length": 2, "counts": [1, -1]}',
            r"histogram\.json: is not as .* `counts\.1` = -1",
        ),
        ("histogram.json", '{"max_sequence_length": 3, "counts": [1]}', r"histogram\.json: 1 counts for lengths 1 to 3"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (write_workdir(tmp_path) / name).write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        report(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()
