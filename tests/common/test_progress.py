"""Progress: plain lines in a log, nothing when quiet, figures that a person can read; any value in a short line."""

from __future__ import annotations

import io
import mmap
import time

import pytest

from gaudi_bert.common.errors import shortened, shown
from gaudi_bert.common.progress import Reporter, human_bytes, human_seconds, measured


def test_bytes_and_seconds() -> None:
    sizes = {7: "7 B", 1500: "1.5 kB", 2_300_000: "2.3 MB", 4e12: "4.0 TB", 7e18: "7000.0 PB"}
    assert {size: human_bytes(size) for size in sizes} == sizes
    times = {0.44: "0.4 s", 59: "59 s", 61: "1 min 01 s", 7260: "2 h 01 min"}
    assert {seconds: human_seconds(seconds) for seconds in times} == times


@pytest.mark.parametrize("quiet", [False, True])
def test_a_log_gets_complete_lines_or_nothing(quiet: bool) -> None:
    stream = io.StringIO()
    reporter = Reporter(stream, quiet=quiet)
    reporter.say("done")
    with reporter.task("scan", 10, "sequences") as task:
        task.advance(5)
        reporter.show(task.line(task.started + 1))
    assert stream.getvalue() == ("" if quiet else "done\nscan: 50 %, 5.0 sequences/s, 1.0 s left\n")


@pytest.mark.parametrize(
    ("done", "seconds", "line"),
    [
        (0, 12, "plan: 0 %, 12 s so far"),
        (1, 4, "plan: 5 %, 4.0 s per group, 1 min 16 s left"),
        (10, 4, "plan: 50 %, 2.5 groups/s, 4.0 s left"),
        (20, 1, "plan: 100 %, 20 groups/s, 0.0 s left"),
        (20.000001, 1, "plan: 100 %, 20 groups/s, 0.0 s left"),  # a sum of shares
    ],
)
def test_a_rate_is_known_from_the_first_unit_on(done: float, seconds: float, line: str) -> None:
    with Reporter(quiet=True).task("plan", 20, "groups") as task:
        task.advance(done)
        assert task.line(task.started + seconds) == line


def test_what_was_done_before_says_nothing_about_the_speed() -> None:
    with Reporter(quiet=True).task("train", 20, "updates") as task:
        task.advance(3)
        task.count_from_now(10)
        assert task.line(task.started + 7).startswith("train: 50 %, 7.0 s so far")
        task.advance(5)
        assert task.line(task.started + 1e9).startswith("train: 75 %, ")


def test_the_number_of_units_may_be_seen_later() -> None:
    with Reporter(quiet=True).task("predict", 1, "rows") as task:
        assert task.line(task.started + 3) == "predict: 0 %, 3.0 s so far"
        task.count_from_now(0, total=40)
        task.advance(10)
        assert task.line(task.started + 1e9).startswith("predict: 25 %, ")


def test_work_whose_first_unit_takes_long_shows_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaudi_bert.common.progress.TERMINAL_LINE_EVERY_SECONDS", 0.001)
    stream = io.StringIO()
    reporter = Reporter(stream)
    reporter.live = True
    with reporter.task("plan", 20, "groups"):
        while "plan: 0 %" not in stream.getvalue():
            time.sleep(0.001)
    assert stream.getvalue().endswith("\r"), "the line is gone in the end"


# --- measuring


def test_a_call_is_measured() -> None:
    def take() -> mmap.mmap:
        memory = mmap.mmap(-1, 80_000_017)  # new to the process, whatever the C library keeps of earlier tests
        memory.write(bytes(80_000_017))
        return memory

    found = measured(take)
    assert len(found.result) == 80_000_017
    assert found.seconds > 0
    assert found.memory_bytes is None or found.memory_bytes > 40_000_000


# --- values in messages


def test_long_texts_keep_their_ends() -> None:
    assert shortened("a  b\nc") == "a b c"
    line = shortened("first" + "x" * 5_000_000 + "last", 100)
    assert len(line) <= 100
    assert line.startswith("first")
    assert line.endswith("last")


def test_any_value_is_shown_shortly() -> None:
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep, deep]
    assert shown(3) == "3"
    assert shown("a") == "'a'"
    assert shown(1 << 24_000) == "a number of 24,001 bits"
    assert len(shown(deep)) <= 80
    assert len(shown({"x" * 1_000_000: "y" * 1_000_000})) <= 80
