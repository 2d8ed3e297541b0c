"""The way from text to the first training step in docs/tables.md, typed as a reader would: Python and commands, in order."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.builders.command_line import run_command

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("pyarrow", exc_type=ImportError)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tables.md"
PRINTS = re.compile(r"^ *print\(.*\)  # (.*)$", re.M)


def test_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text(encoding="utf-8").split("## From text to the first training step\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```(\w*)\n(.*?)```", section, flags=re.S)
    assert [language for language, _ in blocks] == ["python", "", "python"]
    names: dict[str, Any] = {}
    for language, block in blocks:
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block, str(PAGE), "exec"), names)
            assert printed.getvalue().splitlines() == PRINTS.findall(block)
            continue
        for line in block.splitlines():
            done = run_command(*line.split()[1:], folder=tmp_path)
            assert done.returncode == 0, done.stderr
            assert " tokens" in done.stdout or "verified: every one of" in done.stdout
