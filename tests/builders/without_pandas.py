"""Runs `gaudi-bert` with the given arguments as where pandas is not installed (as in the images)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from gaudi_bert.cli import main


class _Blocked(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, _Blocked())
    main()
