"""Measure how much faster bfloat16 is than float32 on this CPU, with a small BERT. `doctor` reports the result."""

from __future__ import annotations

import time

import numpy as np

from gaudi_bert.common.arrays import BatchArrays
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import ComputeDtype, Model, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import VectorHead

# The measurement uses a small model with the layer sizes of MiniLM. Two layers are enough, because every layer takes the
# same time.
_CONFIG = BertConfig(vocab_size=1000, hidden_size=384, num_hidden_layers=2, num_attention_heads=12, intermediate_size=1536)
SHAPES = {"8 rows of 256 tokens": (8, 256), "1 row of 16 tokens": (1, 16)}
_SECONDS = 0.5  # how long the batches of each shape are measured


def measure_bfloat16_time_ratios() -> dict[str, float]:
    """Measure how long batches take in bfloat16 on this CPU, compared with float32. The measurement takes about a second.

    Returns:
        The shortest time of a batch in bfloat16 divided by the shortest time in float32, for each shape by its description.
    """
    models: dict[ComputeDtype, Model] = {kind: build_benchmark_model(kind) for kind in ("float32", "bfloat16")}
    return {name: _measure_time_ratio(models, make_batch(*shape)) for name, shape in SHAPES.items()}


def build_benchmark_model(compute_dtype: ComputeDtype) -> Model:
    """Return a small BERT for inference. Its frozen weights are random, but the same in every call."""
    model = load_engine("pytorch").build_model(
        ModelSpec(_CONFIG, VectorHead("mean", normalize=True)), seed=1, compute_dtype=compute_dtype
    )
    model.freeze()
    return model


def make_batch(rows: int, length: int) -> BatchArrays:
    """Return a batch of `rows` rows that contain one text of `length` tokens each.

    The token ids are random, but the same in every call.
    """
    ids = np.random.default_rng(1).integers(5, _CONFIG.vocab_size, (rows, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    batch = {"input_ids": ids, "input_mask": np.ones_like(ids), "segment_ids": np.zeros_like(ids), "positions": positions}
    return {**batch, "sequence_positions": np.zeros((rows, 1), np.int32)}


def _measure_time_ratio(models: dict[ComputeDtype, Model], batch: BatchArrays) -> float:
    """Run the batch repeatedly in both data types, and return the shortest time in bfloat16 divided by the shortest time in
    float32.
    """
    shortest = dict.fromkeys(models, np.inf)
    for model in models.values():
        model.compute_outputs(batch)  # not timed, because the first batch also allocates memory
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        for kind, model in models.items():
            begun = time.perf_counter()
            model.compute_outputs(batch)
            shortest[kind] = min(shortest[kind], time.perf_counter() - begun)
    return float(shortest["bfloat16"] / shortest["float32"])
