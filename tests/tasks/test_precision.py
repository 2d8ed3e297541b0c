"""Bfloat16 beside float32 on this processor: batches of both shapes are computed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", exc_type=ImportError)

import numpy as np

from gaudi_bert.tasks import precision


def test_shares_are_measured_for_each_shape() -> None:
    shares = precision.measure_bfloat16_time_ratios()
    assert shares.keys() == precision.SHAPES.keys()
    assert all(np.isfinite(share) and share > 0 for share in shares.values())


def test_both_models_compute_the_same() -> None:
    batch = precision.make_batch(3, 16)
    wide, narrow = (precision.build_benchmark_model(kind).compute_outputs(batch) for kind in ("float32", "bfloat16"))
    assert wide.shape == (3, 1, 384)
    assert 0 < np.abs(wide - narrow).max() < 0.01
