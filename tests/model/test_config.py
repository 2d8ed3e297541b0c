"""Variables of a BERT and their first values; its config; batches that are too large for any."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import BertConfig, ParameterSpec, count_parameters, draw_initial_value, parameter_specs
from gaudi_bert.model.heads import check_logit_count
from tests.builders.model_packs import small_config


def test_variables_have_googles_names_and_shapes_and_bert_base_its_110_million_parameters():
    shapes = {name: spec.shape for name, spec in parameter_specs(small_config()).items()}
    assert {
        "bert/encoder/layer_1/attention/self/query/kernel": (21, 21),
        "bert/encoder/layer_0/intermediate/dense/kernel": (21, 35),
        "bert/embeddings/LayerNorm/gamma": (21,),
        "cls/predictions/output_bias": (53,),
        "cls/seq_relationship/output_weights": (2, 21),
    }.items() <= shapes.items()
    assert len(shapes) == 5 + 16 * 2 + 2 + 5 + 2
    assert count_parameters(small_config()) == sum(int(np.prod(shape)) for shape in shapes.values())
    assert count_parameters(BertConfig()) == 110_106_428


def test_noise_depends_on_seed_and_name_alone_and_is_truncated_normal():
    spec = ParameterSpec((120, 120), "normal")
    one, again, other_seed, other_name = (
        draw_initial_value(name, spec, 0.02, seed) for name, seed in (("a", 7), ("a", 7), ("a", 8), ("b", 7))
    )
    np.testing.assert_array_equal(again, one)
    assert not np.array_equal(other_seed, one)
    assert not np.array_equal(other_name, one)
    assert np.abs(one).max() <= 0.04
    assert abs(one.std() - 0.0176) < 0.0005
    assert abs(one.mean()) < 0.0005


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_attention_heads": 5}, "not a multiple"),
        ({"hidden_dropout_prob": 1.0}, "less than 1"),
        ({"hidden_act": "swish"}, "gelu, gelu_new, relu"),
        ({"vocab_size": 0}, "from 1 to 16,777,216"),
    ],
)
def test_wrong_configs_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        small_config(**values)


def test_config_reads_hugging_faces_json():
    config = BertConfig.from_json({"model_type": "bert", "hidden_size": 24, "num_attention_heads": 3, "use_cache": True})
    assert (config.hidden_size, config.intermediate_size) == (24, 3072)
    assert BertConfig.from_json(config.to_json()) == config
    stored = {**small_config().to_json(), "model_type": "bert", "is_decoder": False}
    assert BertConfig.from_json(stored) == small_config()
    assert BertConfig.from_json({**stored, "is_decoder": True}) == dataclasses.replace(small_config(), attention="causal")
    for change, message in (({"model_type": "roberta"}, "only bert"), ({"add_cross_attention": True}, "cross-attention")):
        with pytest.raises(InputError, match=message):
            BertConfig.from_json({**stored, **change})


def test_scores_of_words_that_int32_cannot_number_are_refused():
    check_logit_count(2, 2**15, 2**15 - 1)
    with pytest.raises(InputError, match="micro_batch_packs"):
        check_logit_count(2, 2**15, 2**15)
