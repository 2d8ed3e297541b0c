"""A process: its part of the work, TensorFlow's variables, how to install an extra; its progress, and values in messages."""

from __future__ import annotations

import importlib.metadata
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.common import errors
from gaudi_bert.common.errors import InputError, has_tensorflow, install_command, shortened, shown
from gaudi_bert.common.launch import parse_part
from gaudi_bert.common.progress import Reporter, human_bytes, human_seconds
from gaudi_bert.common.tensorflow_environment import native_lines_to, prepare_tensorflow
from tests.builders.command_line import run_python


def slurm(task: int, first: int, last: int, count: int | None = None, step: int = 1) -> dict[str, str]:
    """The variables of one task of `sbatch --array=first-last:step`."""
    tasks = (last - first) // step + 1 if count is None else count
    numbers = {"ID": task, "MIN": first, "MAX": last, "COUNT": tasks, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("text", "part"), [("0/1", (0, 1)), ("6/7", (6, 7)), ("00/16", (0, 16)), ("99999/100000", (99999, 100000))]
)
def test_a_given_part_is_taken_whatever_the_environment_says(text: str, part: tuple[int, int]) -> None:
    assert parse_part(text, {}) == part
    assert parse_part(text, {**slurm(3, 0, 7), "JOB_COMPLETION_INDEX": "2"}) == part


@pytest.mark.parametrize("first", [0, 1, 17])
def test_the_tasks_of_an_array_are_counted_from_its_first(first: int) -> None:
    parts = [parse_part("auto", slurm(task, first, first + 4)) for task in range(first, first + 5)]
    assert parts == [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]

    without_step = {name: value for name, value in slurm(9, 8, 9).items() if name != "SLURM_ARRAY_TASK_STEP"}
    assert parse_part("auto", without_step) == (1, 2)


def test_the_pods_of_an_indexed_job_are_counted_by_their_index() -> None:
    assert [parse_part("auto/3", {"JOB_COMPLETION_INDEX": str(index)}) for index in range(3)] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("text", "found", "said"),
    [
        ("auto", slurm(3, 1, 7, step=2), "the 4 tasks of this array go from 1 to 7 in steps of 2; .* --array=1-4"),
        ("auto", slurm(3, 1, 7, count=3), "the 3 tasks of this array go from 1 to 7 in steps of 1; .* without gaps"),
        ("auto", slurm(8, 0, 7), "SLURM_ARRAY_TASK_ID is 8, and the array goes from 0 to 7"),
        ("auto", slurm(0, 0, 7) | {"SLURM_ARRAY_TASK_COUNT": "many"}, "SLURM_ARRAY_TASK_COUNT is 'many', not a"),
        ("auto", slurm(0, 0, 7) | {"SLURM_ARRAY_TASK_ID": "-1"}, "SLURM_ARRAY_TASK_ID is '-1', not an integer"),
        ("auto", {}, "SLURM_ARRAY_TASK_ID is not set, so this is not part of a Slurm array"),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}, "an Indexed Job does not say how many pods it has; write auto/N"),
        ("auto/4", {}, "JOB_COMPLETION_INDEX is not set, so this is not part of an Indexed Job"),
        ("auto/4", slurm(0, 0, 3), "JOB_COMPLETION_INDEX is not set"),
        ("auto/4", {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX is 4, write K/N with K from 0 to N - 1"),
        ("auto/4", {"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is '', not an integer"),
        ("auto/0", {"JOB_COMPLETION_INDEX": "0"}, "K from 0 to N - 1"),
        ("automatic", {}, "write K/N .* or auto, or auto/N"),
        *((text, {}, "K from 0 to N - 1") for text in ("4/4", "0/0", "-1/4", "1", "1/4 ", "٣/4")),
    ],
)
def test_what_is_no_part_is_refused_in_one_line(text: str, found: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        parse_part(text, found)
    assert str(caught.value).startswith(f"--shard {text}: ")
    assert "\n" not in str(caught.value)


# --- the variables that TensorFlow reads while it is loaded: before every import of it, and never over the user's own


def test_onednn_is_used_on_every_processor_unless_the_user_says_otherwise() -> None:
    unset: dict[str, str] = {}
    prepare_tensorflow(unset)
    assert unset == {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    chosen = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "1"}
    before = dict(chosen)
    prepare_tensorflow(chosen)
    assert chosen == before


def test_on_gaudi_the_vendor_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("habana_frameworks")
    package.__spec__ = types.SimpleNamespace(name="habana_frameworks")
    monkeypatch.setitem(sys.modules, "habana_frameworks", package)
    environment: dict[str, str] = {}
    prepare_tensorflow(environment)
    assert environment == {"TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.mark.parametrize("module", ["gaudi_bert.engines.tensorflow.bert", "gaudi_bert.engines.tensorflow.engine"])
def test_it_is_set_before_tensorflow_is_loaded(module: str) -> None:
    """The import is stopped where it comes to TensorFlow, which would read its variables there."""
    code = (
        "import importlib, os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tensorflow':\n"
        "            print(os.environ.get('TF_ENABLE_ONEDNN_OPTS'))\n"
        "            sys.exit()\n"
        "sys.meta_path.insert(0, Watch())\n"
        f"importlib.import_module({module!r})\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["1"], done.stderr


# --- what is written below Python goes to the log, what Python prints to the terminal; afterwards all is as it was.

NATIVE = """
import os, sys
from pathlib import Path
from gaudi_bert.common.progress import Reporter, human_bytes, human_seconds
from gaudi_bert.common.tensorflow_environment import native_lines_to
from gaudi_bert.common.progress import Reporter

reporter = Reporter()
reporter.say("before")
with native_lines_to(Path(sys.argv[1])):
    os.write(2, b"native\\n")
    reporter.say("inside")
    print("error: inside", file=sys.stderr)
    if len(sys.argv) > 2:
        raise SystemExit("stopped")
os.write(2, b"native again\\n")
reporter.say("after")
"""


def test_only_what_is_below_python_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "native.log"
    log.write_text("of the run before\n", encoding="utf-8")
    done = run_python(NATIVE, log)
    assert done.stderr.splitlines() == ["before", "inside", "error: inside", "native again", "after"]
    assert log.read_text(encoding="utf-8").splitlines() == ["of the run before", "native"]


def test_an_error_inside_reaches_the_terminal(tmp_path: Path) -> None:
    done = run_python(NATIVE, tmp_path / "native.log", "stop")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["before", "inside", "error: inside", "stopped"]


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-folder"), native_lines_to(tmp_path / "no-folder" / "native.log"):
        pass


# --- the command that installs an extra: for this Python, from the clone that is here


@pytest.mark.parametrize("extra", ["parquet", "docker", "kubernetes", "s3", "gcs", "azure"])
def test_the_command_is_for_this_python_and_the_clone(extra: str, repository: Path) -> None:
    assert f"\n{extra} = [" in (repository / "pyproject.toml").read_text(encoding="utf-8")
    words = shlex.split(install_command(extra))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    source, _, named = words[-1].partition("[")
    assert named == f"{extra}]"
    assert source == "./gaudi-bert" or (Path(source) / "pyproject.toml").is_file()


def test_pytorch_is_the_build_for_this_machine_and_tensorflow_may_need_another_python(monkeypatch) -> None:
    assert "-m uv pip install --torch-backend auto " in install_command("pytorch")
    assert [has_tensorflow((3, minor)) for minor in range(9, 14)] == [False, True, True, False, False]
    monkeypatch.setattr(errors, "_TENSORFLOW_PYTHONS", ())
    assert install_command("tensorflow").startswith("python3.11 -m venv env && env/bin/python -m pip install ")


def test_without_its_clone_the_package_is_named_as_the_readme_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = '{"url": "file:///gone/gaudi_bert-1.0-py3-none-any.whl", "archive_info": {}}'
    wheel = types.SimpleNamespace(read_text=lambda name: gone)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [wheel])
    assert install_command("parquet").endswith(" -m pip install './gaudi-bert[parquet]'")


# --- progress: plain lines in a log, nothing when quiet, figures that a person can read


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
    assert stream.getvalue() == ("" if quiet else "done\nscan: 50 %, 1.0 s so far\n")


def lines_of(done_at: Callable[[float], float], seconds: int, total: float = 100) -> list[str]:
    """The lines of a task each second, of which so much is done at a time."""
    with Reporter(quiet=True).task("plan", total, "groups") as task:
        lines = []
        for second in range(1, seconds + 1):
            task.advance(done_at(second) - task.done)
            task.observe(task.started + second)
            lines.append(task.line(task.started + second))
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


def test_the_end_is_not_told_again_and_again_as_no_time_left() -> None:
    lines = lines_of(lambda second: min(20.000001, 2 * second), 30, total=20)  # a sum of shares
    assert lines[9:12] == [f"plan: 100 %, {second} s so far, ending" for second in (10, 11, 12)]


def test_what_was_done_before_says_nothing_about_the_speed() -> None:
    with Reporter(quiet=True).task("predict", 1, "rows") as task:
        assert task.line(task.started + 3) == "predict: 0 %, 3.0 s so far"
        task.count_from_now(10, total=40)
        assert task.line(task.started + 7).startswith("predict: 25 %, 7.0 s so far")
        task.advance(10)
        task.observe(task.started + 50)
        task.advance(10)
        assert task.line(task.started + 100).startswith("predict: 75 %, 5.0 s per row, 50 s left")


def test_work_whose_first_unit_takes_long_shows_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaudi_bert.common.progress.TERMINAL_LINE_EVERY_SECONDS", 0.001)
    stream = io.StringIO()
    reporter = Reporter(stream)
    reporter.live = True
    with reporter.task("plan", 20, "groups"):
        while "plan: 0 %" not in stream.getvalue():
            time.sleep(0.001)
    assert stream.getvalue().endswith("\r"), "the line is gone in the end"


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
