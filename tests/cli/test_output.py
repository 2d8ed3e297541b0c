"""What commands say of themselves: all of them, each one, on a terminal, and to a shell that completes."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys

import pytest

from gaudi_bert.cli.main import GROUPS
from gaudi_bert.config.sections import TASK_NAMES, PrepareSettings
from tests.builders.command_line import run_command, run_python, succeed

COMMANDS = [name for group in GROUPS.values() for name in group]


def test_every_command_is_listed_and_explains_itself() -> None:
    done = succeed("--help")
    assert "..." not in done.stdout.replace("[ARGS]...", ""), "no summary is cut off"
    groups = done.stdout.partition("Before anything is written:")[2]
    listed = re.findall(r"^  ([a-z][a-z0-9-]*)  ", groups, flags=re.MULTILINE)
    assert set(listed) == {*COMMANDS, "k8s"} - {"wait"}
    for same in (["-h"], ["help"]):
        assert run_command(*same).stdout == done.stdout
    assert run_command("help", "pack").stdout == run_command("pack", "-h").stdout
    for command in listed:
        usage = succeed(command, "--help").stdout.splitlines()[0]
        assert usage.startswith("Usage: ")
        assert f" {command} " in usage


def on_a_terminal(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code of a command whose output is a terminal, and what it prints there."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "gaudi_bert", *arguments]
    variables = {"TERM": "xterm", "COLUMNS": "80", **os.environ, **environment}
    with subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=variables) as process:
        os.close(there)
        pieces = []
        with contextlib.suppress(OSError):  # Linux ends a terminal with an error
            while piece := os.read(here, 4096):
                pieces.append(piece)
    os.close(here)
    return process.returncode, b"".join(pieces).decode().replace("\r\n", "\n")


@pytest.mark.parametrize(("group", "heading"), [([], "Pretraining:"), (["k8s"], "Commands:")], ids=["all", "k8s"])
def test_a_bare_call_is_answered_on_a_terminal_and_refused_in_a_script(group: list[str], heading: str) -> None:
    code, text = on_a_terminal(*group)
    assert code == 0
    assert f"\033[1m{heading}\033[0m" in text
    assert re.sub(r"\033\[\d+m", "", text) == on_a_terminal(*group, "--help", NO_COLOR="1")[1]
    done = run_command(*group)
    assert (done.returncode, done.stdout) == (2, "")
    assert heading in done.stderr


def test_errors_are_red_on_a_terminal() -> None:
    assert on_a_terminal("report", "absent")[1].startswith("\033[31merror:\033[0m absent")
    assert on_a_terminal("report", "absent", NO_COLOR="1")[1].startswith("error: absent")


def test_shells_complete_commands() -> None:
    code = "import sys; sys.argv = ['gaudi-bert']; from gaudi_bert.cli import main; main()"
    done = run_python(code, _GAUDI_BERT_COMPLETE="complete_bash", COMP_WORDS="gaudi-bert ver", COMP_CWORD="1")
    assert "verify" in done.stdout
    assert "verify-model" in done.stdout


@pytest.mark.parametrize(
    ("command", "option", "default"),
    [
        ("plan", "algorithm", "optimal"),
        ("pack", "depth", "3 for records, max for tables"),
        ("pack", "group-bytes", "1GiB"),
        ("finetune", "depth", "6"),
        ("prepare", "train-vocab", str(PrepareSettings().train_vocab)),
    ],
)
def test_help_tells_defaults_of_settings(command: str, option: str, default: str) -> None:
    done = run_command(command, "--help", environment={**os.environ, "COLUMNS": "120"})
    (line,) = [line for line in re.sub(r"\n {20,}", " ", done.stdout).splitlines() if line.startswith(f"  --{option} ")]
    assert f"default: {default}" in line


def test_help_names_every_task() -> None:
    text = " ".join(succeed("finetune", "-h").stdout.split())
    assert [name for name in TASK_NAMES if name not in text.replace("- ", "-")] == []
