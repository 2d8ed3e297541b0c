"""What a module loads when it is imported, in a fresh interpreter: what a command does not need is not waited for."""

from __future__ import annotations

import subprocess
import sys

import pytest

DATA_MODULES = ["numba", "scipy", "highspy", "tensorflow", "matplotlib", "pyarrow", "tokenizers"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gaudi_bert.cli", ["numpy", *DATA_MODULES]),
        ("gaudi_bert.runners.local", DATA_MODULES),
        ("gaudi_bert.runners.kubernetes.run", ["kubernetes", "numpy", "tensorflow", "docker"]),
        ("gaudi_bert.stages.train", ["scipy", "highspy", "docker", "kubernetes"]),
        ("gaudi_bert.stages.write", ["tensorflow", "matplotlib", "tokenizers"]),
        ("gaudi_bert.stages.prepare", ["tensorflow", "matplotlib"]),
    ],
)
def test_importing_does_not_load(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print(*[name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
