"""metrics.jsonl and TensorBoard: one value per update, whatever was stopped; intervals; the server for Prometheus."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import pipeline_from_mapping
from gaudi_bert.stages.training.train import train
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.metrics import (
    Interval,
    MetricsServer,
    MetricsWriter,
    PretrainingFigures,
    figures_from_sums,
    progress_line,
)
from tests.builders import training_data as data
from tests.builders.agree import agree, identical

BATCH = {"next_sentence_weights": np.array([[1, 1], [1, 0]]), "input_mask": np.array([[1, 1, 2], [1, 0, 0]])}


def test_figures_are_sums_by_weights() -> None:
    figures = figures_from_sums(np.array([30.0, 10, 4, 8, 5, 20, 3, 4]))
    assert figures.as_json() == {
        "loss": 3.5,
        "masked_lm_loss": 3.0,
        "masked_lm_accuracy": 0.25,
        "next_sentence_loss": 0.5,
        "next_sentence_accuracy": 0.75,
    }


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
    interval = Interval(1, has_cold_start=True, clock=lambda: next(times))
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
    assert report.figures.masked_lm_loss == 3.0


def test_time_between_intervals_is_nobodys() -> None:
    times = iter([7.0, 8.0])
    interval = Interval(51, has_cold_start=False, clock=lambda: next(times))
    for _ in range(3):
        interval.begin()
        interval.add(tf.ones(9), [BATCH])
    agree(interval.close(Communicator()).seconds_per_update, 1 / 3)


@pytest.mark.parametrize(
    ("slot", "value", "what"), [(0, np.nan, "the loss"), (2, np.inf, "the loss"), (8, np.nan, "the gradient")]
)
def test_the_first_update_that_is_not_finite_is_named(slot, value, what) -> None:
    interval = Interval(41, has_cold_start=False)
    good, bad = np.ones(9, np.float32), np.ones(9, np.float32)
    bad[slot] = value
    for sums in (good, good, bad, bad):
        interval.add(tf.constant(sums), [BATCH])
    with pytest.raises(FailedError, match=f"update 43: {what} is not finite"):
        interval.close(Communicator())


def test_the_line_for_people() -> None:
    figures = PretrainingFigures(
        loss=5.8134, masked_lm_loss=5.1234, masked_lm_accuracy=0.2, next_sentence_loss=0.69, next_sentence_accuracy=0.5
    )
    values = {"tokens_per_second": 12345.6, "sequences_per_second": 321.0, "packing_factor": 2.3456}
    assert progress_line(50, 200, figures, values, 95.0) == (
        "train: update 50/200 (25%), masked-LM loss 5.123 accuracy 0.200, next-sentence loss 0.690 accuracy 0.500, "
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
    with MetricsServer(0, updates=800) as server:
        assert scrape(server.port) == {"gaudi_bert_updates": 800}
        server.update("train", 50, {"loss": 7.25, "sequences": 100, "tokens": 2345})
        server.update("train", 100, {"loss": 6.5, "sequences": 200, "tokens": 4690})
        server.update("evaluation", 100, {"loss": 6.75, "sequences": 200})
        assert scrape(server.port, "/metrics?a=b") == {
            "gaudi_bert_updates": 800,
            "gaudi_bert_update": 100,
            "gaudi_bert_train_loss": 6.5,
            "gaudi_bert_evaluation_loss": 6.75,
            "gaudi_bert_sequences_total": 200,
            "gaudi_bert_tokens_total": 4690,
        }
        with pytest.raises(urllib.error.HTTPError, match="404"):
            scrape(server.port, "/")


def test_a_port_that_is_taken_is_said() -> None:
    with (
        MetricsServer(0, updates=1) as server,
        pytest.raises(FailedError, match=rf"metrics_port = {server.port}: .*another"),
    ):
        MetricsServer(server.port, updates=1)


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


def test_a_real_training_is_scraped_while_it_runs_and_not_afterwards(tmp_path: Path) -> None:
    packed = data.write_packed(tmp_path / "data", data.make_packs(29))
    port = free_port()
    settings = pipeline_from_mapping(
        {
            "model": data.MODEL,
            "training": {
                "updates": 6,
                "warmup_updates": 1,
                "global_batch_sequences": 16,
                "micro_batch_packs": 8,
                "log_every_updates": 2,
                "metrics_port": port,
            },
        },
        "test",
    )
    scraper = Scraper(port)
    train(settings, packed, None, tmp_path / "run", reporter=scraper)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(scraper.found) == [2, 4, 6]
    for line in lines:
        served = scraper.found[line["update"]]
        assert served["gaudi_bert_updates"] == 6
        assert served["gaudi_bert_update"] == line["update"]
        identical(served["gaudi_bert_train_masked_lm_loss"], line["masked_lm_loss"])
        assert served["gaudi_bert_train_tokens_per_second"] == line["tokens_per_second"]
        assert served["gaudi_bert_tokens_total"] == line["tokens"]
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(port)
