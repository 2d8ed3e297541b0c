"""What is written below Python goes to the log, what Python prints to the terminal; afterwards all is as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.native_lines import native_lines_to

CODE = """
import os, sys
from pathlib import Path
from gaudi_bert.common.native_lines import native_lines_to
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


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=False)


def test_only_what_is_below_python_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "native.log"
    log.write_text("of the run before\n", encoding="utf-8")
    done = run(str(log))
    assert done.stderr.splitlines() == ["before", "inside", "error: inside", "native again", "after"]
    assert log.read_text(encoding="utf-8").splitlines() == ["of the run before", "native"]


def test_an_error_inside_reaches_the_terminal(tmp_path: Path) -> None:
    done = run(str(tmp_path / "native.log"), "stop")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["before", "inside", "error: inside", "stopped"]


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-folder"), native_lines_to(tmp_path / "no-folder" / "native.log"):
        pass
