"""The layout that design and README promise: imports point one way, heavy ones are late, names of others stay out."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "gaudi_bert"

# Which rooms a room may import from, besides itself and the standard library. `common` is the floor under all of them.
ALLOWED = {
    "common": set(),
    "config": {"common"},
    "artefacts": {"common", "config"},
    "records": {"common"},
    "packing": {"common"},
    "model": {"common"},
    "corpus": {"common", "records"},
    "reporting": {"common", "artefacts", "packing", "config"},
    "training": {"common", "model", "records", "packing", "config"},
    "stages": {"common", "artefacts", "corpus", "records", "packing", "model", "training", "reporting", "config"},
    "runners": {"common", "artefacts", "stages", "config"},
    "cli": {"common", "artefacts", "runners", "stages", "config"},
    "__main__": {"cli"},
    "__init__": set(),
}

# Modules that only some environments have, and the rooms that may import them at their top.
HEAVY = {
    "tensorflow": {"model", "training"},
    "horovod": set(),
    "habana_frameworks": set(),
    "docker": set(),
    "kubernetes": set(),
    "matplotlib": {"reporting"},
    "jinja2": {"reporting"},
    "pyarrow": set(),
    "tokenizers": {"corpus"},
    "scipy": {"packing"},
    "highspy": {"packing"},
    "numba": {"common", "packing", "records"},
}


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        yield room, path, ast.parse(path.read_text(encoding="utf-8"))


def imported(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "gaudi_bert" else [node.module]
    return []


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import: the module's body, but not what stands under `if TYPE_CHECKING`."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node


def test_imports_between_rooms_point_one_way() -> None:
    wrong = []
    for room, path, tree in modules():
        for node in ast.walk(tree):
            for name in imported(node) if isinstance(node, ast.stmt) else []:
                parts = name.split(".")
                if parts[0] != "gaudi_bert" or len(parts) < 2 or parts[1] == "__version__":
                    continue
                if parts[1] != room and parts[1] not in ALLOWED[room]:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_room_is_known() -> None:
    assert {room for room, _, _ in modules()} <= set(ALLOWED)


def test_no_relative_imports() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for _, path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong


def test_heavy_imports_happen_late_or_in_their_room() -> None:
    wrong = []
    for room, path, tree in modules():
        for node in top_level(tree):
            for name in imported(node):
                top = name.split(".")[0]
                if top in HEAVY and room not in HEAVY[top]:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} imports {name} at its top")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gaudi_bert.cli", ["numpy", "numba", "scipy", "highspy", "tensorflow", "matplotlib", "pyarrow", "tokenizers"]),
        ("gaudi_bert.runners.local", ["numba", "scipy", "highspy", "tensorflow", "matplotlib", "pyarrow", "tokenizers"]),
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


def test_no_function_swallows_everything_or_asserts_on_input() -> None:
    wrong = []
    for _, path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                names = ast.unparse(node.type) if node.type else "everything"
                broad = node.type is None or names in ("Exception", "BaseException")
                if broad and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} swallows {names}")
            if isinstance(node, ast.Assert):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} asserts")
    assert not wrong, "\n".join(wrong)
