"""How to install an extra, and values in messages."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
import types
from pathlib import Path

import pytest

from gaudi_bert.common import errors
from gaudi_bert.common.errors import InputError, install_command, short_repr, shorten, supports_tensorflow


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
    assert [supports_tensorflow((3, minor)) for minor in range(9, 14)] == [False, True, True, False, False]
    monkeypatch.setattr(errors, "_TENSORFLOW_PYTHONS", ())
    assert install_command("tensorflow").startswith("python3.11 -m venv env && env/bin/python -m pip install ")


def test_without_its_clone_the_package_is_named_as_the_readme_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = '{"url": "file:///gone/gaudi_bert-1.0-py3-none-any.whl", "archive_info": {}}'
    wheel = types.SimpleNamespace(read_text=lambda name: gone)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [wheel])
    assert install_command("parquet").endswith(" -m pip install './gaudi-bert[parquet]'")


def test_long_texts_keep_their_ends_and_messages_are_one_line() -> None:
    assert shorten("a  b\nc") == str(InputError("a  b\nc")) == "a b c"
    line = shorten("first" + "x" * 5_000_000 + "last", 100)
    assert len(line) <= 100
    assert line.startswith("first")
    assert line.endswith("last")


def test_any_value_is_shown_shortly() -> None:
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep, deep]
    assert [short_repr(value) for value in (3, "a", 1 << 24_000)] == ["3", "'a'", "a number of 24,001 bits"]
    assert max(len(short_repr(value)) for value in (deep, {"x" * 1_000_000: "y" * 1_000_000})) <= 80
