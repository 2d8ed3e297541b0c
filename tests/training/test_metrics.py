"""What a run tells: metrics.jsonl and TensorBoard, intervals, the server for Prometheus, MLPerf's log."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.artefacts.training import LossFigures, TrainingResult
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import pipeline_from_mapping
from gaudi_bert.config.sections import FineTuneSettings, MlperfSettings, TrainingSettings
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.metrics import MetricsServer, MetricsWriter
from gaudi_bert.training.mlperf import MlperfLog, open_log
from gaudi_bert.training.objective import Interval, IntervalReport, PretrainingObjective
from gaudi_bert.training.run_plan import FINE_TUNING_KEYS, TRAINING_KEYS, RunPlan
from gaudi_bert.training.train import train
from tests.builders import training_data as data
from tests.builders.agree import agree, identical
from tests.builders.effort import LONG

OBJECTIVE = PretrainingObjective("token")
LARGE = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
WHO = MlperfSettings(log=True, organization="someone", platform="two cores")
BATCH = {"next_sentence_weights": np.array([[1, 1], [1, 0]]), "input_mask": np.array([[1, 1, 2], [1, 0, 0]])}


def test_later_lines_and_a_half_line_go_when_a_run_is_resumed(tmp_path) -> None:
    with MetricsWriter(tmp_path, 0) as metrics:
        for update in (10, 20, 30):
            metrics.write("train", update, {"loss": 1.0 / update, "tokens": update})
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as handle:
        handle.write('{"update": 40, "ki')
    with MetricsWriter(tmp_path, 20) as metrics:
        metrics.write("evaluation", 25, {"loss": 2.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["kind"], line["update"]) for line in lines] == [("train", 10), ("train", 20), ("evaluation", 25)]
    events = [
        (event.step, value.tag)
        for path in sorted((tmp_path / "tensorboard").iterdir())
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    assert (30, "train/loss") in events
    assert (25, "evaluation/loss") in events


def test_a_damaged_line_in_the_middle_is_named(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1}\nnonsense\n' + json.dumps({"update": 2}) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2 is not JSON"):
        MetricsWriter(tmp_path, 2)


def test_an_interval_counts_real_work_and_leaves_the_first_update_out_of_the_speed() -> None:
    times = iter([0.0, 100.0, 102.0])
    interval = Interval(OBJECTIVE, 1, has_cold_start=True, clock=lambda: next(times))
    sums = tf.constant([30.0, 10, 4, 8, 5, 20, 3, 4, 2.0])
    for batches in ([BATCH], [BATCH, BATCH]):
        interval.begin()
        interval.add(sums, batches)
    report = interval.close(Communicator())
    assert (report.sequences, report.tokens) == (9, 12)
    assert (report.sequences_per_second, report.tokens_per_second) == (3.0, 4.0)
    assert report.slots_per_second == BATCH["input_mask"].size
    assert report.packing_factor == 3 / len(BATCH["input_mask"])
    assert report.seconds_per_update == 2.0
    assert report.gradient_norm == 2.0
    assert report.figures.as_json() == {
        "loss": 3.5,
        "masked_lm_loss": 3.0,
        "masked_lm_accuracy": 0.25,
        "next_sentence_loss": 0.5,
        "next_sentence_accuracy": 0.75,
    }


def test_time_between_intervals_is_nobodys() -> None:
    times = iter([7.0, 8.0])
    interval = Interval(OBJECTIVE, 51, has_cold_start=False, clock=lambda: next(times))
    for _ in range(3):
        interval.begin()
        interval.add(tf.ones(9), [BATCH])
    agree(interval.close(Communicator()).seconds_per_update, 1 / 3)


@pytest.mark.parametrize(
    ("slot", "value", "what"), [(0, np.nan, "the loss"), (2, np.inf, "the loss"), (8, np.nan, "the gradient")]
)
def test_the_first_update_that_is_not_finite_is_named(slot, value, what) -> None:
    interval = Interval(OBJECTIVE, 41, has_cold_start=False)
    good, bad = np.ones(9, np.float32), np.ones(9, np.float32)
    bad[slot] = value
    for sums in (good, good, bad, bad):
        interval.add(tf.constant(sums), [BATCH])
    with pytest.raises(FailedError, match=f"update 43: {what} is not finite"):
        interval.close(Communicator())


@pytest.mark.parametrize(("keys", "section"), [(TRAINING_KEYS, TrainingSettings), (FINE_TUNING_KEYS, FineTuneSettings)])
def test_advice_names_settings_of_the_run(keys, section) -> None:
    interval = Interval(OBJECTIVE, 41, has_cold_start=False, keys=keys)
    interval.add(tf.constant(np.full(9, np.nan, np.float32)), [BATCH])
    with pytest.raises(FailedError) as failed:
        interval.close(Communicator())
    with MetricsServer(0, 0, 1) as server, pytest.raises(FailedError) as taken:
        MetricsServer(server.port, 0, 1, keys)
    assert str(taken.value).endswith("choose another port")
    named = re.findall(r"\b([a-z]+)\.([a-z_]+)\b", f"{failed.value} {taken.value}")
    assert len(named) == 3
    assert all(name == section.section_name and key in section.model_fields for name, key in named)


def test_the_line_for_people() -> None:
    figures = LossFigures(
        loss=5.8134, masked_lm_loss=5.1234, masked_lm_accuracy=0.2, next_sentence_loss=0.69, next_sentence_accuracy=0.5
    )
    report = IntervalReport(figures, 1.0, 9, 12, 2.3456, 95 / 150, 321.0, 12345.6, 1.0)
    assert report.line(50, 200) == (
        "update 50/200 (25%), masked-LM loss 5.123 accuracy 0.200, next-sentence loss 0.690 accuracy 0.500, "
        "12,346 tokens/s, 321 sequences/s (2.35 per pack), 1 min 35 s left"
    )


# --- what a run serves to Prometheus: the text, and a real training that is scraped while it runs

SAMPLE = re.compile(r"(gaudi_bert_[a-z_]+) ([-+0-9.e]+)")


def scrape(port: int, path: str = "/metrics") -> dict[str, float]:
    """The samples, each with its type before it, as a scraper takes them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    samples: dict[str, float] = {}
    for help_line, type_line, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        match = SAMPLE.fullmatch(sample)
        assert match is not None, sample
        assert help_line.startswith(f"# HELP {match[1]} ")
        assert type_line == f"# TYPE {match[1]} {'counter' if match[1].endswith('_total') else 'gauge'}"
        assert match[1] not in samples
        samples[match[1]] = float(match[2])
    return samples


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_newest_report_of_each_kind_is_served() -> None:
    with MetricsServer(0, done_updates=40, planned_updates=800) as server:
        assert scrape(server.port) == {"gaudi_bert_update": 40, "gaudi_bert_planned_updates": 800}
        server.update("train", 50, {"loss": 7.25, "sequences": 100, "tokens": 2345})
        server.update("train", 100, {"loss": 6.5, "sequences": 200, "tokens": 4690})
        server.update("evaluation", 100, {"loss": 6.75, "sequences": 200})
        assert scrape(server.port, "/metrics?a=b") == {
            "gaudi_bert_planned_updates": 800,
            "gaudi_bert_update": 100,
            "gaudi_bert_train_loss": 6.5,
            "gaudi_bert_evaluation_loss": 6.75,
            "gaudi_bert_sequences_total": 200,
            "gaudi_bert_tokens_total": 4690,
        }


class Scraper(Reporter):
    """Scrapes in a thread of its own whenever the run reports, as soon as it says how far it is."""

    def __init__(self, port: int) -> None:
        super().__init__(quiet=True)
        self.port = port
        self.found: dict[int, dict[str, float]] = {}

    def say(self, text: str) -> None:
        match = re.match(r"train: update (\d+)/", text)
        if match is not None:
            thread = threading.Thread(target=lambda: self.found.update({int(match[1]): scrape(self.port)}))
            thread.start()
            thread.join(30)


@dataclass(frozen=True)
class Run:
    """Its folder, its result, what was served, and what came to standard output."""

    folder: Path
    result: TrainingResult
    scraper: Scraper
    printed: str


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A training that is scraped while it runs, with MLPerf's log; it may end early, by its target."""
    pytest.importorskip("mlperf_logging")
    folder, port = tmp_path_factory.mktemp("run"), free_port()
    packed = data.write_packed(folder / "data", data.make_packs(16))
    training = {
        "optimizer": "lamb",
        "updates": 6,
        "warmup_updates": 1,
        "global_batch_sequences": 16,
        "micro_batch_packs": 8,
        "log_every_updates": 1,
        "evaluate_every_updates": 2,
        "target_masked_lm_accuracy": 1e-9,
        "metrics_port": port,
    }
    mlperf = WHO.model_copy(update={"division": "open"}).model_dump()
    settings = pipeline_from_mapping({"model": data.MODEL, "training": training, "mlperf": mlperf}, "test")
    scraper, out = Scraper(port), io.StringIO()
    with contextlib.redirect_stdout(out):
        result = train(settings, packed, packed, folder / "run", reporter=scraper).content
    return Run(folder / "run", result, scraper, out.getvalue())


@pytest.mark.slow
def test_a_real_training_is_scraped_while_it_runs_and_not_afterwards(run: Run) -> None:
    reports = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    reports = [line for line in reports if line["kind"] == "train"]
    assert [line["update"] for line in reports] == list(run.scraper.found) == list(range(1, run.result.updates + 1))
    for line in reports:
        served = run.scraper.found[line["update"]]
        assert served["gaudi_bert_planned_updates"] == 6
        assert served["gaudi_bert_update"] == line["update"]
        identical(served["gaudi_bert_train_masked_lm_loss"], line["masked_lm_loss"])
        assert served["gaudi_bert_train_tokens_per_second"] == line["tokens_per_second"]
        assert served["gaudi_bert_tokens_total"] == line["tokens"]
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(run.scraper.port)


# --- MLPerf's log: accepted by MLPerf's own checker, as far as a small run can be; nothing of it unless asked for


def accepted(log: Path, ruleset: str) -> bool:
    """Whether MLPerf's checker passes `log`."""
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    checker = compliance.make_checker("training", ruleset, quiet=False, werror=True)
    return compliance.main(str(log), f"training_{ruleset}/common.yaml", checker)[0]


def entries(log: Path) -> list[dict]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text(encoding="utf-8").splitlines()]


def keys(log: Path) -> list[str]:
    return [line["key"] for line in entries(log)]


def write_log(path: Path, accuracies: list[float], settings: MlperfSettings = WHO) -> None:
    """The log of a run of BERT-large whose evaluations gave `accuracies`; the last one is the target."""
    pytest.importorskip("mlperf_logging")
    training = TrainingSettings(optimizer="lamb", global_batch_sequences=448, micro_batch_packs=28)
    plan = RunPlan(training, 2.0, processes=8, processes_per_worker=8, slots_per_pack=512, packs=1000)
    log = MlperfLog(path, settings)
    log.describe(plan, SimpleNamespace(packs=1000, packing_factor=2.0), LARGE)
    with log:
        log.begins(0)
        for number, accuracy in enumerate(accuracies, start=1):
            log.evaluation_begins(number * 448)
            log.evaluation_ends(number * 448, accuracy, 10_000, finished=number == len(accuracies))


@pytest.mark.repeated
@pytest.mark.parametrize("ruleset", ["2.1.0", "3.0.0", "3.1.0", "4.0.0", "4.1.0"] if LONG else ["2.1.0", "4.1.0"])
def test_a_run_is_accepted_in_the_closed_division_where_it_reached_the_target(tmp_path: Path, ruleset: str) -> None:
    for last, is_accepted in ((0.724, True), (0.719, False)):
        write_log(tmp_path / "mlperf.log", [0.31, last])
        assert accepted(tmp_path / "mlperf.log", ruleset) == is_accepted


def test_blocks_and_evaluations_alternate(tmp_path: Path) -> None:
    write_log(tmp_path / "mlperf.log", [0.1, 0.8])
    run = keys(tmp_path / "mlperf.log")
    block, evaluation = ["block_start", "block_stop"], ["eval_start", "eval_accuracy", "eval_stop"]
    first = [*evaluation[:1], "eval_samples", *evaluation[1:]]
    assert run[run.index("run_start") :] == ["run_start", *block, *first, *block, *evaluation, "run_stop"]
    assert entries(tmp_path / "mlperf.log")[-1]["metadata"]["status"] == "success"
    values = {line["key"]: line["value"] for line in entries(tmp_path / "mlperf.log")}
    assert (values["global_batch_size"], values["gradient_accumulation_steps"]) == (448, 1)
    assert (values["train_samples"], values["eval_samples"]) == (2000, 10_000)


def test_a_run_that_fails_is_aborted(tmp_path: Path) -> None:
    pytest.importorskip("mlperf_logging")
    log = MlperfLog(tmp_path / "mlperf.log", WHO)
    with pytest.raises(FailedError), log:
        log.begins(0)
        raise FailedError("the loss is not finite")
    assert keys(tmp_path / "mlperf.log")[-2:] == ["block_stop", "run_stop"]
    assert entries(tmp_path / "mlperf.log")[-1]["metadata"]["status"] == "aborted"


def test_the_log_of_a_real_run_is_accepted_in_the_open_division(run: Run) -> None:
    log = run.folder / "mlperf.log"
    assert accepted(log, "4.1.0")
    assert ":::MLLOG" not in run.printed
    accuracies = [line["value"] for line in entries(log) if line["key"] == "eval_accuracy"]
    agree(accuracies[-1], run.result.evaluation.masked_lm_accuracy)
    assert entries(log)[-1]["metadata"]["status"] == ("success" if run.result.reached_target else "aborted")


def test_without_being_asked_nothing_is_loaded_and_a_missing_package_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog", None)
    run = (None, SimpleNamespace(packs=None), LARGE)
    assert open_log(tmp_path / "mlperf.log", MlperfSettings(), True, *run) is None
    assert open_log(tmp_path / "mlperf.log", WHO, False, *run) is None
    with pytest.raises(InputError, match=r"install version 4\.1\.68, or set it to false"):
        open_log(tmp_path / "mlperf.log", WHO, True, *run)
