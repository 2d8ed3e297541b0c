"""Small BERTs, random sequences and packs of them, for the tests of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gaudi_bert.config.values import EngineName
from gaudi_bert.engines import is_installed, load_engine
from gaudi_bert.engines.protocol import ComputeDtype, Model, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import Head, Loss, PretrainingHead
from gaudi_bert.training.verify_model import Sequence

VOCABULARY = 53
WITHOUT_PYTORCH = pytest.mark.skipif(not is_installed("pytorch"), reason="PYTORCH MISSING: install it to test both engines")
BY_EACH_ENGINE = pytest.mark.parametrize("engine", ["tensorflow", pytest.param("pytorch", marks=WITHOUT_PYTORCH)])


def small_config(**changes) -> BertConfig:
    """A BERT with odd sizes; weights are large enough for every part of it to matter."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 21,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 35,
        "max_position_embeddings": 41,
        "initializer_range": 0.2,
        **changes,
    }
    return BertConfig(**values)


def small_model(
    seed: int = 1,
    compute_dtype: ComputeDtype = "float32",
    compiled: bool = False,
    engine: EngineName = "tensorflow",
    **changes,
) -> Any:
    """A model whose biases and layer norms are not at their start of 0 and 1 either."""
    spec = ModelSpec(small_config(**changes), PretrainingHead())
    model = load_engine(engine).build_model(spec, seed=seed, compute_dtype=compute_dtype, compiled=compiled)
    noise = np.random.default_rng(seed)
    moved = {
        name: value + noise.normal(0, 0.2, value.shape).astype(np.float32)
        for name, value in model.copy_variables().items()
        if value.ndim == 1
    }
    model.load_variables(moved)
    return model


def random_sequence(random: np.random.Generator, length: int, masked: int, label: int) -> Sequence:
    positions = np.sort(random.choice(length, masked, replace=False))
    return Sequence(
        input_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
        segment_ids=(np.arange(length) >= random.integers(1, length + 1)).astype(np.int32),
        masked_positions=positions.astype(np.int32),
        masked_ids=random.integers(0, VOCABULARY, masked).astype(np.int32),
        next_sentence_label=label,
    )


def random_packs(seed: int, lengths: list[list[int]]) -> list[list[Sequence]]:
    """Packs of sequences of the given lengths.

    Of three sequences in a row two have label 1: were the labels balanced, the gradient of the next-sentence bias would be a
    difference of nearly equal sums, and its relative error that of the cancellation.
    """
    random = np.random.default_rng(seed)
    packs, count = [], 0
    for pack in lengths:
        packs.append([])
        for length in pack:
            masked = int(random.integers(1, max(2, length // 4) + 1)) if length > 1 else 1
            packs[-1].append(random_sequence(random, length, min(masked, length), 0 if count % 3 == 2 else 1))
            count += 1
    return packs


# --- behind the protocol of the engines


def pretraining_model(
    config: BertConfig, seed: int | None, loss: Loss = "token", engine: EngineName = "tensorflow"
) -> Model:
    return model_of(config, PretrainingHead(loss), seed, engine)


def model_of(config: BertConfig, head: Head, seed: int | None = 1, engine: EngineName = "tensorflow") -> Model:
    return load_engine(engine).build_model(ModelSpec(config, head), seed=seed)
