"""README.md and the pages below docs/: their blocks of code, and the commands in them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
# A block of no language, or of bash, holds commands; one of `text` what the commands before it print.
SHELL = ("", "bash")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the number of its first line."""

    language: str
    text: str
    line: int

    @property
    def commands(self) -> list[str]:
        """The commands: those after `$`, or where there is no `$`, all lines; `\\` at an end joins lines."""
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line[2:] for line in lines if line.startswith("$ ")] or [line for line in lines if line.strip()]

    @property
    def output(self) -> list[str]:
        """The lines that the block says are printed."""
        shown = self.language == "text" or re.search(r"^\$ ", self.text, flags=re.MULTILINE)
        return [line for line in self.text.splitlines() if shown and line.strip("$ .") and not line.startswith("$ ")]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield Block(match[1], match[2], text[: match.start()].count("\n") + 2)


def load_module(path: Path) -> Any:
    """A Python file outside the package, such as a script, as a module."""
    loader = SourceFileLoader(path.stem, str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    loader.exec_module(module)
    return module


def write_program(path: Path, text: str = f'exec {sys.executable} -m gaudi_bert "$@"') -> None:
    """Write a shell script that can be run, by default one that runs this checkout's `gaudi-bert`."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))
