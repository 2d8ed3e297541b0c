"""The command that installs an extra: for this Python, from the clone that is here."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from pathlib import Path

import pytest

from gaudi_bert.common import errors
from gaudi_bert.common.errors import has_tensorflow, install_command


@pytest.mark.parametrize("extra", ["parquet", "docker", "kubernetes", "s3", "gcs", "azure"])
def test_the_command_is_for_this_python_and_the_clone(extra: str, repository: Path) -> None:
    assert f"\n{extra} = [" in (repository / "pyproject.toml").read_text(encoding="utf-8")
    words = shlex.split(install_command(extra))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    source, _, named = words[-1].partition("[")
    assert named == f"{extra}]"
    assert source == "./gaudi-bert" or (Path(source) / "pyproject.toml").is_file()


def test_pytorch_is_the_build_for_cpus_where_there_is_no_gpu() -> None:
    assert "-m uv pip install --torch-backend auto " in install_command("pytorch")


def test_where_tensorflow_does_not_run_another_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [has_tensorflow((3, minor)) for minor in range(9, 14)] == [False, True, True, False, False]
    monkeypatch.setattr(errors, "_TENSORFLOW_PYTHONS", ())
    assert install_command("tensorflow").startswith("python3.11 -m venv env && env/bin/python -m pip install ")


def test_without_its_clone_the_package_is_named_as_the_readme_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [Wheel()])
    assert install_command("parquet").endswith(" -m pip install './gaudi-bert[parquet]'")


class Wheel:
    """Installed from a file that is gone."""

    def read_text(self, name: str) -> str:
        return '{"url": "file:///gone/gaudi_bert-1.0-py3-none-any.whl", "archive_info": {}}'
