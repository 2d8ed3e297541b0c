"""How often a test tries: as often as there is time for in `make test`, or as often as `make test-long` has time for."""

from __future__ import annotations

import os

LONG = os.environ.get("GAUDI_BERT_LONG_TESTS") == "1"


def tries(usual: int, long: int) -> int:
    """The number of attempts: `usual`, or `long` in `make test-long`, which runs the tests marked `repeated`."""
    return long if LONG else usual
