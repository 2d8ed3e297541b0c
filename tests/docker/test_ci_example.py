"""The workflow that docs/ci-example gives to users: its steps are run, in order, as a runner would."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import yaml

from tests.builders.real_containers import Docker

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "ci-example"


def steps() -> list[dict[str, str]]:
    """The steps of the workflow's only job."""
    (job,) = yaml.safe_load((EXAMPLE / "workflow.yaml").read_text())["jobs"].values()
    return job["steps"]


def test_the_workflow_checks_out_both_repositories_and_then_runs_commands() -> None:
    assert [step["uses"] for step in steps() if "uses" in step] == ["actions/checkout@v4", "actions/checkout@v4"]
    assert sum("run" in step for step in steps()) == 4


def test_every_step_of_the_workflow_ends_well(tmp_path: Path, docker: Docker) -> None:
    """What the two checkouts give is laid by hand: the user's files, and this checkout as `gaudi-bert`."""
    shutil.copy(EXAMPLE / "ci.yaml", tmp_path)
    shutil.copytree(EXAMPLE / "text", tmp_path / "text")
    (tmp_path / "gaudi-bert").symlink_to(ROOT)
    work = tmp_path / "work" / "ci"
    work.mkdir(parents=True)
    if work.owner() == "root":  # a runner of the workflow is not root
        shutil.chown(work, 1000, 1000)
    for step in steps():
        if "run" in step:
            command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
            assert done.returncode == 0, f"{step['name']}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    assert "packing factor" in done.stdout
