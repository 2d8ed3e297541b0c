"""Part K of N as the page on Kubernetes shows it: its examples give what one command gives."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from gaudi_bert.common.launch import parse_shard_option
from tests.builders.command_line import succeed
from tests.builders.folders import contents
from tests.builders.packing_case import make_case
from tests.builders.pages import ROOT, write_program

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^### ([\w ]+)\n(?:(?!^#).)*?^```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def made_in(folder: Path) -> dict[str, bytes]:
    """All but the settings, which name the part."""
    return {name: content for name, content in contents(folder).items() if name != "settings.json"}


def run_example(example: str, folder: Path) -> None:
    """Run an example of the page in `folder`, with programs that stand for other machines: each runs its command here."""
    write_program(folder / "bin" / "gaudi-bert")
    write_program(folder / "bin" / "ssh", 'exec sh -c "$2"')
    # Four parts on the page, two here: each process takes a second to start.
    script = EXAMPLES[example]
    fewer = {"=0-3": "=0-1", "seq 0 3": "seq 0 1", "K/4": "K/2", "in 0 1 2 3": "in 0 1", "part/4": "part/2"}
    for four, two in fewer.items():
        script = script.replace(four, two)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NUMBA_NUM_THREADS": "1"}
    command = ["bash", "-eu", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_examples_of_the_page_pack_and_prove_what_one_command_does(tmp_path: Path) -> None:
    """Seven files."""
    case = make_case(tmp_path / "case", files=7, sequences_per_file=50)
    (tmp_path / "records").symlink_to(case.records)
    succeed("pack", case.records, "--out", tmp_path / "whole", "--verify")
    run_example("xargs", tmp_path)
    assert made_in(tmp_path / "packed") == made_in(tmp_path / "whole")
    (tmp_path / "packed" / "verification.json").unlink()
    run_example("Verifying", tmp_path)
    assert made_in(tmp_path / "packed") == made_in(tmp_path / "whole")


def test_the_job_of_the_page_is_one_that_a_cluster_takes_and_whose_pods_are_its_parts() -> None:
    pytest.importorskip("kubernetes_validate")
    from tests.k8s.manifest_checks import VERSIONS, check_schema

    job = yaml.safe_load(EXAMPLES["An Indexed Job of your own"])
    for version in VERSIONS:
        assert list(check_schema(job, version)) == []
    pods = job["spec"]["completions"]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    asked = command[command.index("--shard") + 1]
    parts = [parse_shard_option(asked, {"JOB_COMPLETION_INDEX": str(index)}) for index in range(pods)]
    assert parts == [(index, pods) for index in range(pods)]
