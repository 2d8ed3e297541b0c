"""How often a test tries, in `make test-all` and in `make test-long`; and what is made once for a whole session."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

LONG = os.environ.get("GAUDI_BERT_LONG_TESTS") == "1"


def tries(usual: int, long: int) -> int:
    """The number of attempts: `usual`, or `long` in `make test-long`, which runs the tests marked `repeated`."""
    return long if LONG else usual


def sampled(cases: Iterable[Any], step: int, first: int = 0) -> list[Any]:
    """The cases of a table for `parametrize`: `make test` runs each `step`-th, from `first` on, and `make test-all` all."""
    return [
        case
        if number % step == first
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, which all processes of this test session share; `make` fills it, once."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # of another process, whose attempt failed
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder
