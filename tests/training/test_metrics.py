"""What a run tells: metrics.jsonl and TensorBoard, and the figures of an interval."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.training.metrics import MetricsWriter
from gaudi_bert.training.objective import Interval, PretrainingObjective
from tests.builders.agree import agree

OBJECTIVE = PretrainingObjective("token")
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
        interval.add(sums.numpy, batches)
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
        interval.add(tf.ones(9).numpy, [BATCH])
    agree(interval.close(Communicator()).seconds_per_update, 1 / 3)


@pytest.mark.parametrize(
    ("slot", "value", "what"), [(0, np.nan, "the loss"), (2, np.inf, "the loss"), (8, np.nan, "the gradient")]
)
def test_the_first_update_that_is_not_finite_is_named(slot, value, what) -> None:
    interval = Interval(OBJECTIVE, 41, has_cold_start=False)
    good, bad = np.ones(9, np.float32), np.ones(9, np.float32)
    bad[slot] = value
    for sums in (good, good, bad, bad):
        interval.add(tf.constant(sums).numpy, [BATCH])
    with pytest.raises(FailedError, match=f"update 43: {what} is not finite"):
        interval.close(Communicator())
