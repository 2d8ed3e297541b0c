"""`verify-model`: the proof for a user's checkpoint and data, and that it fails when packing does change something."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.artefacts.results import to_json
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.engines.tensorflow import bert
from gaudi_bert.engines.tensorflow.bert import _make_additive_attention_mask
from gaudi_bert.training.checkpoint import Checkpoint, write_checkpoint
from gaudi_bert.training.verify_model import verify_model
from tests.builders.model_packs import pretraining_model, small_config
from tests.builders.reporters import QUIET


@pytest.fixture
def checkpoint(tmp_path):
    config = small_config(max_position_embeddings=64, attention="causal")
    values = pretraining_model(config, 3).copy_variables()
    write_checkpoint(tmp_path / "checkpoints", Checkpoint(7, values, settings={"model": config.to_json()}))
    return tmp_path


def test_random_weights_on_random_sequences():
    stream = io.StringIO()
    result = verify_model(checkpoint=None, reporter=Reporter(stream))
    assert result.leak_comparisons > result.sequences > result.packs
    assert max(result.differences["hidden_states"], result.differences["gradient"]) < 1e-5
    printed = to_json(result)
    assert json.loads(json.dumps(printed)) == printed
    assert "stayed bit-identical" in stream.getvalue()


def test_a_checkpoint(checkpoint):
    result = verify_model(checkpoint=checkpoint, reporter=QUIET)
    assert result.sequences > result.packs > 1
    assert result.differences["masked_lm_logits"] < 1e-4
    assert result.differences["gradient"] < 1e-5
    assert result.leak_comparisons > 0


def test_a_leaking_mask_is_found(monkeypatch):
    monkeypatch.setattr(
        bert, "_make_additive_attention_mask", lambda mask, *rest: _make_additive_attention_mask(tf.minimum(mask, 1), *rest)
    )
    with pytest.raises(FailedError, match=r"packed and unpacked .* differ by"):
        verify_model(checkpoint=None, reporter=QUIET)


def test_a_wrong_gradient_is_found(monkeypatch):
    """Gradients of the encoder that depend on how many rows there are: outputs agree, gradients do not."""
    right = bert.encode_packs

    def damaged(network, batch, *positions):
        share = 1.0 / len(batch["input_ids"])
        damped = {
            name: share * value + (1 - share) * tf.stop_gradient(value) if "/layer_" in name else value
            for name, value in network.parameters.items()
        }
        return right(replace(network, parameters=damped), batch, *positions)

    monkeypatch.setattr(bert, "encode_packs", damaged)
    with pytest.raises(FailedError, match="gradient of bert/encoder"):
        verify_model(checkpoint=None, reporter=QUIET)


def test_a_checkpoint_without_the_settings_of_its_model_is_refused(tmp_path):
    write_checkpoint(tmp_path, Checkpoint(1, {"bert/pooler/dense/bias": np.zeros(3, np.float32)}))
    with pytest.raises(InputError, match="no model settings"):
        verify_model(checkpoint=tmp_path, reporter=QUIET)
