"""Progress: lines in a log, figures that a person can read, and the time left."""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common.progress import Reporter, format_bytes, format_seconds
from tests.builders.command_line import run_python


def test_bytes_and_seconds() -> None:
    sizes = {7: "7 B", 1500: "1.5 kB", 2_300_000: "2.3 MB", 4e12: "4.0 TB", 7e18: "7000.0 PB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
    times = {0.44: "0.4 s", 59: "59 s", 61: "1 min 01 s", 7260: "2 h 01 min"}
    assert {seconds: format_seconds(seconds) for seconds in times} == times


@pytest.mark.parametrize("quiet", [False, True])
def test_a_log_gets_complete_lines_or_nothing(quiet: bool) -> None:
    stream = io.StringIO()
    reporter = Reporter(stream, quiet=quiet)
    reporter.say("done")
    with reporter.task("scan", 10, "sequences") as task:
        task.advance(5)
        reporter.show(task.format_line(task.started + 1))
    assert stream.getvalue() == ("" if quiet else "done\nscan: 50 %, 1.0 s so far\n")


def lines_of(done_at: Callable[[float], float], seconds: int, total: float = 100) -> list[str]:
    """The lines of a task each second, of which so much is done at a time."""
    with Reporter(quiet=True).task("plan", total, "groups") as task:
        lines = []
        for second in range(1, seconds + 1):
            task.advance(done_at(second) - task.done)
            task.record_progress(task.started + second)
            lines.append(task.format_line(task.started + second))
    return lines


def seconds_left(lines: Sequence[str]) -> list[float]:
    found = [re.search(r"(?:(\d+) h )?(?:(\d+) min )?(?:([\d.]+) s )?left$", line) for line in lines]
    return [3600 * int(each[1] or 0) + 60 * int(each[2] or 0) + float(each[3] or 0) for each in found if each]


def test_steady_work_tells_its_time_soon_and_right() -> None:
    lines = lines_of(lambda second: 2 * second, 50)
    assert lines[:4] == [f"plan: {2 * second} %, {second}.0 s so far" for second in range(1, 5)]
    assert lines[4] == "plan: 10 %, 2.0 groups/s, 45 s left"
    assert seconds_left(lines) == list(range(45, 0, -1))
    assert lines[-1] == "plan: 100 %, 50 s so far, ending"


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 5)), min_size=1, max_size=6))
def test_the_time_left_never_grows_by_more_than_half(phases: list[tuple[int, float]]) -> None:
    """Work in phases of (seconds, units per second): kernels compile first, caches are warm, another file is slower."""
    done = [0.0]
    for seconds, speed in phases:
        done += [done[-1] + speed * (second + 1) for second in range(seconds)]
    left = seconds_left(lines_of(lambda second: done[int(second)], len(done) - 1, total=done[-1] + 100))
    assert all(after <= 1.5 * before + 60 for before, after in itertools.pairwise(left))  # hours are told in minutes


def test_what_has_not_begun_in_earnest_has_no_time_left() -> None:
    """The first of 25 units compiles for 10 s; the others take one second each."""
    lines = lines_of(lambda second: max(0, second - 9), 34, total=25)
    left = {second: found[0] for second, line in enumerate(lines, 1) if (found := seconds_left([line]))}
    assert min(left) > 10
    assert all(each <= 2 * (34 - second) + 1 for second, each in left.items())


def test_what_was_done_before_says_nothing_about_the_speed() -> None:
    with Reporter(quiet=True).task("predict", 1, "rows") as task:
        assert task.format_line(task.started + 3) == "predict: 0 %, 3.0 s so far"
        task.reset_progress(10, total=40)
        assert task.format_line(task.started + 7).startswith("predict: 25 %, 7.0 s so far")
        task.advance(10)
        task.record_progress(task.started + 50)
        task.advance(10)
        assert task.format_line(task.started + 100).startswith("predict: 75 %, 5.0 s per row, 50 s left")


def test_work_whose_first_unit_takes_long_shows_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaudi_bert.common.progress.TERMINAL_LINE_EVERY_SECONDS", 0.001)
    stream = io.StringIO()
    reporter = Reporter(stream)
    reporter.live = True
    with reporter.task("plan", 20, "groups"):
        while "plan: 0 %" not in stream.getvalue():
            time.sleep(0.001)
    assert stream.getvalue().endswith("\r"), "the line is gone in the end"


# --- a log for what is written below Python


NATIVE = """
import os, sys
from pathlib import Path
from gaudi_bert.common.progress import Reporter, redirect_native_output

reporter = Reporter()
reporter.say("before")
with redirect_native_output(Path(sys.argv[1])):
    os.write(2, b"native\\n")
    reporter.say("inside")
    print("error: inside", file=sys.stderr)
    if len(sys.argv) > 2:
        raise SystemExit("stopped")
os.write(2, b"native again\\n")
reporter.say("after")
"""


@pytest.mark.parametrize("ending", [[], ["stop"]])
def test_only_what_is_below_python_goes_to_the_log(tmp_path: Path, ending: list[str]) -> None:
    log = tmp_path / "native.log"
    log.write_text("of the run before\n", encoding="utf-8")
    done = run_python(NATIVE, log, *ending)
    last = ["stopped"] if ending else ["native again", "after"]
    assert done.stderr.splitlines() == ["before", "inside", "error: inside", *last]
    assert log.read_text(encoding="utf-8").splitlines() == ["of the run before", "native"]
    assert done.returncode == len(ending)
