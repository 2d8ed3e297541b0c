"""How often a test tries: as often as there is time for in `make test`, or as often as `make test-long` has time for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

LONG = os.environ.get("GAUDI_BERT_LONG_TESTS") == "1"


def tries(usual: int, long: int) -> int:
    """The number of attempts: `usual`, or `long` in `make test-long`, which runs the tests marked `repeated`."""
    return long if LONG else usual


def long_form(test: Callable[..., None]) -> Any:
    """Decorate a test with this that only `make test-long` runs: pytest does not collect what is None."""
    return pytest.mark.repeated(test) if LONG else None
