"""Names that `transformers` has, there and back to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.huggingface import from_hugging_face, to_hugging_face
from tests.builders.agree import identical
from tests.builders.model_packs import small_config, small_model

# --- the names that `transformers` has


def test_names_and_back_to_the_bit_also_by_old_names_with_tied_copies():
    ours = {"bert/encoder/layer_11/attention/output/LayerNorm/gamma": 0.0, "bert/embeddings/word_embeddings": 0.0}
    assert list(to_hugging_face(ours)) == [
        "bert.encoder.layer.11.attention.output.LayerNorm.weight",
        "bert.embeddings.word_embeddings.weight",
    ]
    values = small_model().values()
    state = to_hugging_face(values)
    assert len(state) == len(values)
    identical(from_hugging_face(state, small_config()), values)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    old["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    identical(from_hugging_face(old, small_config()), values)


OLD = "bert.encoder.layer.0.output.LayerNorm.gamma"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("bert.encoder.layer.1.output.dense.bias"), "output.dense.bias is missing"),
        (lambda state: state.update({"cls.predictions.bias": np.zeros(3)}), "has the shape"),
        (lambda state: state.update({OLD: np.zeros(24)}), "LayerNorm.weight and .*LayerNorm.gamma are the same weights"),
        (lambda state: state.update({"pooler.dense.bias": np.zeros(24)}), "the same weights; leave out"),
        (lambda state: state.update({"bert.extra": np.zeros(3)}), "bert.extra is unknown"),
        (lambda state: state.update({"cls.predictions.decoder.weight": np.zeros((53, 21))}), "only tied"),
    ],
)
def test_other_weights_are_refused(change, message):
    state = to_hugging_face(small_model().values())
    change(state)
    with pytest.raises(InputError, match=message):
        from_hugging_face(state, small_config())
