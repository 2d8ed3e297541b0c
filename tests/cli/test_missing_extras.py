"""A command whose extra is not installed says in one line how to install it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command where `module` cannot be imported."""
    code = f"import sys; sys.modules[{module!r}] = None; from gaudi_bert.cli import main; main(sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("tensorflow", "tensorflow", ["verify-model"]),
        ("pyarrow", "parquet", ["import", "table.parquet", "--out", "records"]),
        ("pyarrow", "parquet", ["pack", "table.parquet", "--out", "packed", "--max-sequence-length", "9"]),
        ("kubernetes", "kubernetes", ["k8s", "status", "demo.yaml"]),
    ],
)
def test_the_extra_is_named(tmp_path, monkeypatch, module: str, extra: str, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    (tmp_path / "demo.yaml").write_text("name: demo")
    done = without(module, *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"pip install 'gaudi-bert[{extra}]'" in line


def test_what_no_extra_brings_is_a_defect_and_keeps_its_traceback() -> None:
    done = without("numpy", "histogram", "records", "--out", "histogram.json")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
