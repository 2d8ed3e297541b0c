"""metrics.jsonl and TensorBoard; MLPerf's log: accepted by MLPerf's own checker, as far as a small run can be."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.sections import MlperfSettings, TrainingSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.runs.records import train
from gaudi_bert.training.logs import MetricsWriter, MlperfLog
from gaudi_bert.training.run_plan import RunPlan, RunSettings
from tests.builders import training_data as data
from tests.builders.agree import agree
from tests.builders.effort import LONG
from tests.builders.reporters import QUIET
from tests.training.conftest import settings


def test_later_lines_and_a_half_line_go_when_a_run_is_resumed(tmp_path) -> None:
    with MetricsWriter(tmp_path, 0) as metrics:
        for update in (10, 20, 30):
            metrics.write_report("train", update, {"loss": 1.0 / update, "tokens": update})
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as handle:
        handle.write('{"update": 40, "ki')
    with MetricsWriter(tmp_path, 20) as metrics:
        metrics.write_report("evaluation", 25, {"loss": 2.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["kind"], line["update"]) for line in lines] == [("train", 10), ("train", 20), ("evaluation", 25)]
    events = [
        (event.step, value.tag)
        for path in sorted((tmp_path / "tensorboard").iterdir())
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    assert {(30, "train/loss"), (25, "evaluation/loss")} <= set(events)


def test_a_damaged_line_in_the_middle_is_named(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1}\nnonsense\n' + json.dumps({"update": 2}) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2 is not JSON"):
        MetricsWriter(tmp_path, 2)


# --- MLPerf

LARGE = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
WHO = MlperfSettings(log=True, organization="someone", platform="two cores")


def test_the_log_of_a_real_run_is_accepted_in_the_open_division(tmp_path: Path) -> None:
    """The run may end early, by its target."""
    pytest.importorskip("mlperf_logging")
    out, log = io.StringIO(), tmp_path / "run" / "mlperf.log"
    packed = data.write_packed(tmp_path / "data", data.make_packs(16))
    run = settings(optimizer="lamb", updates=6, evaluate_every_updates=2, target_masked_lm_accuracy=1e-9)
    mlperf = WHO.model_copy(update={"division": "open"})
    with contextlib.redirect_stdout(out):
        result = train(run.model_copy(update={"mlperf": mlperf}), packed, packed, log.parent, reporter=QUIET).content
    assert accepted(log, "4.1.0")
    assert ":::MLLOG" not in out.getvalue()
    accuracies = [line["value"] for line in entries(log) if line["key"] == "eval_accuracy"]
    agree(accuracies[-1], result.evaluation.masked_lm_accuracy)
    assert entries(log)[-1]["metadata"]["status"] == ("success" if result.reached_target else "aborted")


def accepted(log: Path, ruleset: str) -> bool:
    """Whether MLPerf's checker passes `log`."""
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    checker = compliance.make_checker("training", ruleset, quiet=False, werror=True)
    return compliance.main(str(log), f"training_{ruleset}/common.yaml", checker)[0]


def entries(log: Path) -> list[dict]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text(encoding="utf-8").splitlines()]


def write_log(path: Path, accuracies: list[float | Exception]) -> None:
    """The log of a run of BERT-large whose evaluations gave `accuracies`; the last one is the target."""
    pytest.importorskip("mlperf_logging")
    training = TrainingSettings(optimizer="lamb", global_batch_sequences=448, micro_batch_packs=28)
    plan = RunPlan(RunSettings.from_training_section(training), 2.0, processes=8, slots_per_pack=512, packs=1000)
    with MlperfLog(path, WHO, plan, SimpleNamespace(pack_count=1000, packing_factor=2.0), LARGE) as log:
        log.log_run_start(0)
        for number, accuracy in enumerate(accuracies, start=1):
            if isinstance(accuracy, Exception):
                raise accuracy
            log.log_evaluation_start(number * 448)
            log.log_evaluation_end(number * 448, accuracy, 10_000, is_finished=number == len(accuracies))


@pytest.mark.repeated
@pytest.mark.parametrize("ruleset", ["2.1.0", "3.0.0", "3.1.0", "4.0.0", "4.1.0"] if LONG else ["4.1.0"])
def test_a_run_is_accepted_in_the_closed_division_where_it_reached_the_target(tmp_path: Path, ruleset: str) -> None:
    for last, is_accepted in ((0.724, True), (0.719, False)):
        write_log(tmp_path / "mlperf.log", [0.31, last])
        assert accepted(tmp_path / "mlperf.log", ruleset) == is_accepted


def test_values_of_the_log_and_a_run_that_is_aborted(tmp_path: Path) -> None:
    write_log(tmp_path / "mlperf.log", [0.1, 0.8])
    (*_, last) = lines = entries(tmp_path / "mlperf.log")
    assert last["metadata"]["status"] == "success"
    expected = {"global_batch_size": 448, "gradient_accumulation_steps": 1, "train_samples": 2000, "eval_samples": 10_000}
    assert {line["key"]: line["value"] for line in lines if line["key"] in expected} == expected
    with pytest.raises(FailedError):
        write_log(tmp_path / "mlperf.log", [0.1, FailedError("the loss is not finite")])
    assert entries(tmp_path / "mlperf.log")[-1]["metadata"]["status"] == "aborted"


def test_a_missing_package_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog", None)
    with pytest.raises(InputError, match=r"4\.1\.68"):
        MlperfLog(tmp_path / "mlperf.log", WHO, None, SimpleNamespace(pack_count=None), LARGE)
