"""The command as a user meets it: help at once, exit codes, one line an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_bert import __version__
from tests.builders.command_line import run_command

COMMANDS = (
    "prepare",
    "histogram",
    "plan",
    "write",
    "pack",
    "verify",
    "estimate",
    "compare",
    "inspect",
    "import",
    "train",
    "evaluate",
    "verify-model",
    "export",
    "run",
    "report",
)


def test_help_lists_every_command() -> None:
    done = run_command("--help")
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.startswith("  ")]
    assert set(COMMANDS) <= set(listed)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = run_command(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")
    assert f" {command} " in done.stdout.splitlines()[0]


def test_help_needs_nothing_heavy() -> None:
    """In a bare environment `--help` works: the heavy modules are made impossible to import."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numpy", "numba", "scipy", "highspy", "tensorflow", "matplotlib", "pyarrow", "tokenizers"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
sys.argv = ["gaudi-bert", "--help"]
from gaudi_bert.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Commands:" in done.stdout


def test_as_a_module_of_its_own_process() -> None:
    done = subprocess.run([sys.executable, "-m", "gaudi_bert", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == run_command("--version").stdout == f"gaudi-bert {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["histogram", "absent", "--out", "h.json"], "absent"),
        (["histogram", ".", "--out", "h.json", "--shard", "4/4"], "--shard 4/4"),
        (["plan", "absent.json", "--out", "plan.json"], "absent.json"),
        (["plan", "absent.json", "--out", "plan.json", "--algorithm", "nnl"], "did you mean `nnls`?"),
        (["plan", "absent.json", "--out", "plan.json", "--depth", "0"], "`packing.depth` = '0'"),
        (["write", ".", "--plan", "p.json", "--out", "o", "--finish", "--shard", "0/2"], "exclude each other"),
        (["prepare", "a.txt", "--out", "o", "--vocab", "v", "--train-vocab", "99"], "exclude each other"),
        (["inspect", "absent"], "absent"),
        (["run", "absent.yaml"], "absent.yaml"),
        (["report", "absent"], "absent"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run_command(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not list(tmp_path.iterdir()), "nothing may be written for a refused request"


def test_an_unknown_stage_is_refused(tmp_path: Path, repository: Path) -> None:
    done = run_command("run", str(repository / "pipelines/demo.yaml"), "--stages", "pack", folder=tmp_path)
    assert done.returncode == 2
    assert "stages are prepare, histogram" in done.stderr


def test_dry_run_prints_all_settings_and_does_nothing(tmp_path: Path, repository: Path) -> None:
    done = run_command(
        "run", str(repository / "pipelines/demo.yaml"), "--dry-run", "--set", "packing.depth=7", folder=tmp_path
    )
    assert done.returncode == 0
    assert "depth: 7" in done.stdout
    assert not list(tmp_path.iterdir())
