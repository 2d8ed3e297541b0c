"""Progress: plain lines in a log, nothing when quiet, figures that a person can read."""

from __future__ import annotations

import io

import pytest

from gaudi_bert.common.progress import Reporter, human_bytes, human_seconds, measured


@pytest.mark.parametrize(("count", "text"), [(7, "7 B"), (1500, "1.5 kB"), (2_300_000, "2.3 MB"), (4e12, "4000.0 GB")])
def test_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4 s"), (59, "59 s"), (61, "1 min 01 s"), (7260, "2 h 01 min")])
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_a_log_gets_whole_lines() -> None:
    stream = io.StringIO()
    reporter = Reporter(stream)
    reporter.say("done")
    with reporter.task("scan", 10, "sequences") as task:
        task.advance(5)
        reporter.show(task.line(task.started + 1))
    assert stream.getvalue() == "done\nscan: 50 %, 5 sequences/s, 1.0 s left\n"


def test_quiet_is_quiet() -> None:
    stream = io.StringIO()
    reporter = Reporter(stream, quiet=True)
    reporter.say("done")
    with reporter.task("scan", 10, "bytes") as task:
        task.advance(10)
    assert stream.getvalue() == ""


#


def test_a_call_is_measured() -> None:
    found = measured(lambda: bytearray(80_000_017))
    assert len(found.result) == 80_000_017
    assert found.seconds > 0
    assert found.memory_bytes is None or found.memory_bytes > 40_000_000
