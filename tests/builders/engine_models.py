"""Models behind the engines' protocol."""

from __future__ import annotations

import pytest

from gaudi_bert.config.values import EngineName
from gaudi_bert.engines.choose import is_installed, load_engine
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import Head, Loss, PretrainingHead

WITHOUT_PYTORCH = pytest.mark.skipif(not is_installed("pytorch"), reason="PYTORCH MISSING: install it to test both engines")
BY_EACH_ENGINE = pytest.mark.parametrize("engine", ["tensorflow", pytest.param("pytorch", marks=WITHOUT_PYTORCH)])


def pretraining_model(
    config: BertConfig, seed: int | None, loss: Loss = "token", engine: EngineName = "tensorflow"
) -> Model:
    return model_of(config, PretrainingHead(loss), seed, engine)


def model_of(config: BertConfig, head: Head, seed: int | None = 1, engine: EngineName = "tensorflow") -> Model:
    return load_engine(engine).build(ModelSpec(config, head), seed=seed)
