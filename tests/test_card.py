"""`benchmarks/card.py` in its rehearsal: the first machine with a card is not where it runs for the first time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.builders.agree import identical
from tests.builders.launched import finished

pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers")

CARD = Path(__file__).parents[1] / "benchmarks" / "card.py"


@pytest.mark.slow
def test_a_rehearsal_measures_what_a_card_would() -> None:
    """On a CPU: everything but what flash-attn, which runs on GPUs only, would give."""
    printed = json.loads(finished([sys.executable, str(CARD), "--device", "cpu", "--small"]).stdout)
    losses = {where: np.array(printed["losses"][where]) for where in ("card", "cpu")}
    assert len(losses["card"]) == 3
    identical(losses["card"], losses["cpu"])
    for each in (printed["models"]["bert-base"][length] for length in ("128", "512")):
        assert each["transformers_tokens_per_second"].pop("flash_attention_2") is None
        assert min(each.pop("sequences_per_second").values()) > 0
        assert each.pop("transformers_tokens_per_second")["sdpa"] > 0
        assert min(each.values()) > 0
    assert printed["two_processes"]["two_over_one"] > 0
