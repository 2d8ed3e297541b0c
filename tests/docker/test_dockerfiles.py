"""The Dockerfiles as text: hadolint, and what it does not look for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docker"
FILES = sorted(FOLDER.glob("*.Dockerfile"))


def test_there_are_four() -> None:
    names = ["data", "train-cpu", "train-gaudi", "train-gaudi-pytorch"]
    assert [file.name for file in FILES] == sorted(f"{name}.Dockerfile" for name in names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing_but_unpinned_debian_packages(file: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    assert program is not None, "hadolint is not installed; run `make setup-test`"
    done = subprocess.run([program, "--ignore", "DL3008", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_comes_from_where_it_must_not(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"^# *syntax=", text, re.MULTILINE), "BuildKit would fetch a frontend"
    assert "privileged" not in text
    assert re.search(r"^ARG BASE_IMAGE=\S+:\S+$", text, re.MULTILINE), "the base image is named with its version"
    # What is lent to the build comes as secrets: build arguments and COPY would stay in the image.
    assert not re.search(r"^(ARG|ENV|COPY|ADD).*(PIP_CERT|PIP_CONF|PIP_INDEX|PASSWORD|TOKEN)", text, re.MULTILINE)
    steps = re.findall(r"^RUN (?:.*\\\n)*.*$", text, re.MULTILINE)
    assert [step for step in steps if "pip-install --" in step] == [
        step for step in steps if "type=secret,id=ca_bundle" in step
    ]


@pytest.mark.parametrize("name", ["data.Dockerfile", "train-cpu.Dockerfile"])
def test_images_without_cards_do_not_run_as_root(name: str) -> None:
    users = re.findall(r"^USER (.*)$", (FOLDER / name).read_text(), re.MULTILINE)
    assert users == ["1000:1000"]
