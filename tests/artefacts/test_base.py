"""Every stored file reads back as what was written, byte for byte, and is read strictly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gaudi_bert.artefacts.base import Artefact, find_complete_parts, manifest_path, part_path
from gaudi_bert.artefacts.histogram import HistogramFile
from gaudi_bert.artefacts.packed import RecordManifest, RecordMetadata, TableManifest, TableMetadata, Verification
from gaudi_bert.artefacts.plan import Plan, WritablePlan
from gaudi_bert.artefacts.training import EvaluationResult, TrainingResult
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.verify import verify_records
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.reporters import a_run

EVALUATION = {
    "loss": 5.25, "masked_lm_loss": 4.5, "masked_lm_accuracy": 0.25, "next_sentence_loss": 0.75,
    "next_sentence_accuracy": 0.5, "unigram_baseline": 0.125, "next_sentence_baseline": 0.5,
    "sequences": 7, "masked_tokens": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    case = make_case(tmp_path_factory.mktemp("case"), files=3)
    verify_records(case.records, case.packed, a_run())
    return case


def test_what_the_stages_write_is_written_again_byte_for_byte(case: PackingCase, tmp_path: Path) -> None:
    RecordMetadata.read(case.packed).write(tmp_path)
    assert (tmp_path / "metadata.json").read_bytes() == (case.packed / "metadata.json").read_bytes()
    files = {
        case.plan.with_name("histogram.json"): HistogramFile,
        case.plan: Plan,
        manifest_path(case.packed, 1): RecordManifest,
        case.packed / "verification.json": Verification,
    }
    for original, kind in files.items():
        kind.read(original).write(tmp_path / original.name)
        assert (tmp_path / original.name).read_bytes() == original.read_bytes(), original.name
    # metadata.json states the CRC-32C of each manifest, so the order of the keys must not change between versions.
    assert list(json.loads(manifest_path(case.packed, 1).read_bytes()))[-4:] == [
        "inputs",
        "index_crc32c",
        "counts",
        "shards",
    ]


def test_parts_of_a_file_are_read_if_all_of_one_number_of_parts_are_there() -> None:
    file = Path("out/histogram.json")
    halves, thirds = ([part_path(file, (number, parts)) for number in range(parts)] for parts in (2, 3))
    names = [path.name for path in (*thirds, *halves)]
    others = ["histogram.json", "plan-00000-of-00001.json", "histogram-00000-of-00004.json"]
    assert find_complete_parts(file, [*names, *others]) == halves
    assert find_complete_parts(file, [*names[:4], *others]) == thirds
    assert find_complete_parts(file, [*names[:2], *others]) == []


def test_a_plan_is_known_by_all_that_it_says(case: PackingCase) -> None:
    plan = WritablePlan.read(case.plan)
    assert plan.sha256 == Plan.read(case.plan).sha256 == RecordManifest.read(manifest_path(case.packed, 0)).source_sha256
    assert sum(plan.strategy_counts.values()) == plan.totals.packs


def test_results_of_training_leave_out_what_was_not_measured(tmp_path: Path) -> None:
    training = {
        "updates": 3, "sequences": 30, "tokens": 300, "processes": 1, "packing_factor": 2.0, "sequences_per_update": 10.0,
        "reached_target": False, "training": None, "evaluation": EVALUATION,
    }  # fmt: skip
    evaluation = {"update": 3, "loss_per": "token", **EVALUATION, "unpacked": EVALUATION, "largest_difference": 1e-7}
    for name, value, model in (("t.json", training, TrainingResult), ("e.json", evaluation, EvaluationResult)):
        text = json.dumps(value, indent=1) + "\n"
        (tmp_path / name).write_text(text)
        model.read(tmp_path / name).write(tmp_path / name)
        assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is not valid JSON"),
        (b"[" * 100_000, "recursion limit"),
        (b'{"sequences": "' + b"9" * 3_000_000 + b'"}', "`sequences` is '99"),
        (b'{"sequences": true}', "`sequences` is True"),
        (b'{"sequences": NaN}', "`sequences` is nan"),
        (b'{"fingerprint": "\\ud800"}', "the file is not valid JSON"),
        (b"[]", "`the content` is "),
    ],
)
def test_whatever_a_file_holds_is_one_short_line(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"\A[^\n]*{reason}[^\n]*\Z") as caught:
        Verification.read(tmp_path / "a.json")
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize("kind", [Plan, WritablePlan, RecordMetadata, RecordManifest, TableManifest, TableMetadata])
def test_another_version_of_a_format_is_refused_with_the_remedy(tmp_path: Path, kind: type[Artefact]) -> None:
    path = tmp_path / "x.json"
    of_table = {"format": "table"} if kind is TableMetadata else {}
    path.write_text(json.dumps({"groups": [], "shards": [], **of_table, "format_version": 1}))
    with pytest.raises(InputError) as refused:
        kind.read(path)
    assert str(refused.value) == f"{path}: format_version is 1, but this version reads 2; {kind.remedy}"
