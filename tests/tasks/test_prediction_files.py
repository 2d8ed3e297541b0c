"""A stream of windows: whole or going on where it was, the same bytes; other inputs and settings are refused."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from gaudi_bert.artefacts.completion import Signature
from gaudi_bert.common.errors import InputError, StoppedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.rows.tokenizer import RowTokenizer
from gaudi_bert.rows.types import BadRow, Row, RowPosition, Sequences, TextRow
from gaudi_bert.rows.window_plan import WindowPlan
from gaudi_bert.tasks import prediction_files as module
from gaudi_bert.tasks.prediction_files import RowSource, StreamResult, open_prediction_output, show_progress
from tests.builders.reporters import QUIET

ROWS: list[Row] = [TextRow(RowPosition(number), f"text {number}") for number in range(1, 24)]
BAD = TextRow(RowPosition(8), "too long")
EXPECTED = b"".join(b"<%d>\n" % number for number in range(1, 24))


class KilledError(Exception):
    """As good as a kill: nothing of ours catches it."""


def answer(window: Sequence[Row | BadRow]) -> bytes:
    """The numbers of the rows."""
    return b"".join(b"<%d>\n" % row.position.number for row in window)


@dataclass(frozen=True)
class Rows(RowSource):
    """Rows that are given, not read; BAD is refused."""

    given: Callable[[], Iterator[Row]] = field(default=lambda: iter(ROWS))

    def read_rows(self, say: Any = None) -> Iterator[Row | BadRow]:
        return self.given()

    def check_rows_tokenizable(self, rows: Sequence[Row | BadRow]) -> None:
        if BAD in rows:
            raise InputError("row 8: has 92 tokens")


SEQUENCES = Sequences(*np.zeros((4, 1), np.int64), cut_rows=1)
PLAN = WindowPlan((), 10, 16, 1.5)


class Terminal(io.StringIO):
    """What a terminal is sent."""

    def isatty(self) -> bool:
        return True


def run(
    out: Path,
    rows: Sequence[Row] | Callable[[], Iterator[Row]] = ROWS,
    *,
    dies_in: int | None = None,
    setting: int = 1,
    data: str = "x",
    replayable: bool = True,
    overwrite: bool = False,
) -> tuple[StreamResult, int]:
    """The result, and how many windows were answered; a run that dies in window `dies_in` has answered as many."""
    signature = Signature("predict", {"setting": setting}, {"data": data})
    given = rows if callable(rows) else lambda: iter(rows)
    source = Rows("x.jsonl" if replayable else "-", TaskSettings(), cast(RowTokenizer, None), 64, "stop", given=given)
    windows = 0
    with open_prediction_output(str(out), signature, source, QUIET, overwrite=overwrite) as answers:
        for window in answers.read_remaining_windows():
            if windows == dies_in:
                raise KilledError
            answers.write_window(window, answer(window), SEQUENCES, PLAN, 0)
            windows += 1
        answers.finish()
    return answers.make_result(), windows


@pytest.fixture(autouse=True)
def windows_of_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_ROWS", 5)


def test_all_at_once(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "x.jsonl"
    result, _ = run(out)
    assert out.read_bytes() == EXPECTED
    assert (result.rows, result.cut_rows, result.tokens, result.padding, result.packed) == (23, 5, 50, 0.375, True)
    assert {path.name for path in out.parent.iterdir()} == {"x.jsonl", "x.jsonl.settings.json", ".x.jsonl.lock"}
    again, windows = run(out)
    assert (again.skipped, windows) == (True, 0)


@pytest.mark.parametrize("dies_in", range(5))
def test_a_killed_run_goes_on(tmp_path: Path, dies_in: int) -> None:
    out = tmp_path / "x.jsonl"
    with pytest.raises(KilledError):
        run(out, dies_in=dies_in)
    assert not out.exists()
    partial = tmp_path / ".x.jsonl.partial"
    if partial.exists():
        with partial.open("ab") as handle:
            handle.write(b"half a li")
    result, windows = run(out)
    assert out.read_bytes() == EXPECTED
    assert (result.rows, result.tokens, windows) == (23, 50, 5 - dies_in)


def test_other_settings_start_anew_or_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    with pytest.raises(KilledError):
        run(out, dies_in=2)
    assert run(out, setting=2)[1] == 5
    with pytest.raises(InputError, match=r"setting: 2 in the file, 1 now"):
        run(out)
    run(out, overwrite=True)
    assert out.read_bytes() == EXPECTED


def test_a_pipe_must_bring_the_same_rows_again(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    with pytest.raises(KilledError):
        run(out, dies_in=3, replayable=False)
    others: list[Row] = [TextRow(RowPosition(1), "another"), *ROWS[1:]]
    with pytest.raises(InputError, match="differ from those of the interrupted run"):
        run(out, others, replayable=False)
    with pytest.raises(InputError, match="differ from those of the interrupted run"):
        run(out, ROWS[:3], replayable=False)
    with pytest.raises(KilledError):  # it starts anew: only two windows remained
        run(out, others, dies_in=4, replayable=False, overwrite=True)
    run(out, replayable=False, overwrite=True)
    assert out.read_bytes() == EXPECTED
    with pytest.raises(InputError, match="already exists"):
        run(out, replayable=False)


@pytest.mark.parametrize("replayable", [True, False])
def test_a_row_that_cannot_be_read_is_met_before_anything_is_computed(tmp_path: Path, replayable: bool) -> None:
    """But for a pipe, which can be read once only: there, what was before it stays."""

    def bad() -> Iterator[Row]:
        yield from ROWS[:7]
        raise InputError("x.jsonl: row 8: text is 3; it must be a text")

    out = tmp_path / "x.jsonl"
    with pytest.raises(InputError, match="row 8"):
        run(out, bad, replayable=replayable)
    assert (tmp_path / ".x.jsonl.partial").exists() != replayable
    _, windows = run(out, replayable=replayable)
    assert (out.read_bytes(), windows) == (EXPECTED, 5 if replayable else 4)


@pytest.mark.parametrize(
    ("rows", "message"), [([], "contains no rows"), ([*ROWS[:7], BAD, *ROWS[8:]], "row 8: has 92 tokens")]
)
def test_no_rows_and_what_the_tokenizer_would_refuse_are_met_as_early(tmp_path: Path, rows: list[Row], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path / "x.jsonl", rows)
    assert not (tmp_path / ".x.jsonl.partial").exists()


@pytest.mark.parametrize(("number", "windows"), [(18, 2), (1, 5)])
def test_a_row_that_was_fixed_keeps_the_windows_before_it(tmp_path: Path, number: int, windows: int) -> None:
    """A row that is answered already is of the first window, so all are answered again."""
    out = tmp_path / "x.jsonl"
    with pytest.raises(KilledError):
        run(out, dies_in=3, data="as it was")
    rows = [*ROWS[: number - 1], TextRow(RowPosition(99), "fixed"), *ROWS[number:]]
    assert run(out, rows, data="fixed")[1] == windows
    assert out.read_bytes() == EXPECTED.replace(b"<%d>" % number, b"<99>")


@pytest.mark.parametrize("data", ["x.jsonl", "-"])
def test_a_terminal_shows_how_far_it_is(tmp_path: Path, data: str) -> None:
    terminal = Terminal()
    reporter = Reporter(terminal)
    signature, states = Signature("predict", {}, {"data": "x"}), []
    source = Rows(data, TaskSettings(), cast(RowTokenizer, None), 64)
    with (
        show_progress("predict", data, str(tmp_path / "a"), reporter) as task,
        open_prediction_output(str(tmp_path / "a"), signature, source, reporter, overwrite=False, task=task) as answers,
    ):
        for window in answers.read_remaining_windows():
            answers.advance_progress_bar(len(window))
            states += [] if task is None else [(task.done, task.total)]
            answers.write_window(window, answer(window), SEQUENCES, PLAN, 0)
        answers.finish()
    answers.make_result()
    assert states == ([] if data == "-" else [(5, 23), (10, 23), (15, 23), (20, 23), (23, 23)])
    assert ("5 rows" in terminal.getvalue()) == (data == "-")


@pytest.mark.parametrize("windows", [0, 1])
def test_a_stop_says_whether_anything_is_kept(tmp_path: Path, windows: int) -> None:
    """Answers are kept a window at a time: before the first one there is nothing to resume from."""
    out = tmp_path / "answers"
    if windows:
        (tmp_path / ".answers.progress.json").write_text("{}")
    error = KeyboardInterrupt if windows else StoppedError
    with pytest.raises(error) as caught, show_progress("embed", "-", str(out), Reporter(quiet=True)):
        raise KeyboardInterrupt
    assert windows or "start from the beginning" in str(caught.value)
