"""What every file of the package imports, read from its syntax: at its top, under `try` or `if`, and inside functions."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "gaudi_bert"


@dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        path: the importing file, relative to the package.
        line: its line there.
        name: what is imported, with dots: a module, or a name inside one.
        late: inside a function, so not when the file itself is imported.
    """

    path: Path
    line: int
    name: str
    late: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


@functools.cache
def syntax_trees() -> list[tuple[Path, ast.Module]]:
    """Every file of the package, relative to it, and its syntax."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE), ast.parse(path.read_text(encoding="utf-8"))) for path in files]


def file_imports(path: Path, tree: ast.AST, late: bool = False) -> Iterator[Import]:
    """The imports of a file, wherever they stand, but for those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = "." * node.level + (node.module or "")
            yield from (Import(path, node.lineno, f"{parent}.{alias.name}", late) for alias in node.names)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from file_imports(path, node, late or inside)


@functools.cache
def own_imports() -> list[tuple[Import, Path]]:
    """Every import of a file of this package by another, and the imported file."""
    found = []
    for path, tree in syntax_trees():
        for item in file_imports(path, tree):
            parts = item.name.split(".")
            if parts[0] == PACKAGE.name and parts[1:] != ["__version__"]:
                found.append((item, _file_of(parts[1:])))
    return found


def _file_of(parts: list[str]) -> Path:
    """The file of a dotted name below the package: the longest part of it that is a file or a folder."""
    for end in range(len(parts), 0, -1):
        path = Path(*parts[:end])
        if (PACKAGE / path).is_dir():
            return path / "__init__.py"
        if (PACKAGE / path).with_suffix(".py").is_file():
            return path.with_suffix(".py")
    return Path("__init__.py")


def circles(imports: dict[Path, set[Path]]) -> list[list[Path]]:
    """Groups of files each of which imports, over others, itself; every group once, sorted."""
    reached: dict[Path, set[Path]] = {}
    for start in imports:
        seen: set[Path] = set()
        waiting = list(imports[start])
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                waiting += imports.get(path, ())
        reached[start] = seen
    groups = {tuple(sorted(other for other in seen if start in reached.get(other, ()))) for start, seen in reached.items()}
    return [list(group) for group in sorted(groups) if group]
