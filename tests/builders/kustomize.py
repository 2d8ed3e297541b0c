"""Building kustomizations with what the machine has."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Json = dict[str, Any]
Build = Callable[[Path], list[Json]]


@pytest.fixture(scope="session")
def kustomize(repository: Path) -> Build:
    """Builds a folder with kustomize or kubectl; skips loudly where there is neither."""
    tools = repository / ".tools" / "usr" / "bin"
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        program = shutil.which(command[0]) or shutil.which(command[0], path=str(tools))
        if program is not None:
            break
    else:
        pytest.skip("KUSTOMIZE MISSING: neither kubectl nor kustomize is there; scripts/install-kustomize.sh brings it")

    def build(folder: Path) -> list[Json]:
        done = subprocess.run([program, *command[1:], str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return list(yaml.load_all(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))

    return build
