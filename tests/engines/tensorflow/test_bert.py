"""The model as a whole: names, start, inputs that do not fit, dropout and types."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.tensorflow.bert import outputs_of_every_token
from gaudi_bert.engines.tensorflow.graph import matrix_flops
from gaudi_bert.engines.tensorflow.losses import pretraining_sums
from gaudi_bert.model.config import BertConfig, parameter_count, parameter_specs
from gaudi_bert.model.features import as_packed, check_batch
from gaudi_bert.model.sequences import join_sequences, split_packs
from tests.builders.agree import agree, identical
from tests.builders.engine_models import pretraining_model
from tests.builders.model_packs import random_packs, small_config, small_model

LENGTHS = [[11, 5, 13], [17, 9]]


def small_batch(masked_slots: int = 17, depth: int = 3) -> dict[str, tf.Tensor]:
    return {
        name: tf.constant(value) for name, value in join_sequences(random_packs(1, LENGTHS), 31, masked_slots, depth).items()
    }


def test_variables_have_googles_names_and_shapes():
    model = pretraining_model(small_config(), 1)
    shapes = model.shapes()
    assert shapes["bert/encoder/layer_1/attention/self/query/kernel"] == (21, 21)
    assert shapes["bert/encoder/layer_0/intermediate/dense/kernel"] == (21, 35)
    assert shapes["bert/embeddings/LayerNorm/gamma"] == (21,)
    assert shapes["cls/predictions/output_bias"] == (53,)
    assert shapes["cls/seq_relationship/output_weights"] == (2, 21)
    assert all(variable.name == f"{name}:0" for name, variable in model.variables.items())
    assert len(shapes) == 5 + 16 * 2 + 2 + 5 + 2
    assert parameter_count(small_config()) == sum(int(np.prod(shape)) for shape in shapes.values())


def test_bert_base_has_its_110_million_parameters():
    assert parameter_count(BertConfig()) == 110_106_428


def test_start_depends_on_seed_and_name_alone():
    two, three = (pretraining_model(small_config(num_hidden_layers=n), 7).variables for n in (2, 3))
    other = pretraining_model(small_config(), 8).variables
    for name, variable in two.items():
        np.testing.assert_array_equal(variable, three[name])
        if parameter_specs(small_config())[name].start == "normal":
            assert not np.array_equal(variable, other[name])
    kernels = [two[f"bert/encoder/layer_{n}/attention/self/query/kernel"].numpy() for n in (0, 1)]
    assert not np.array_equal(*kernels)


def test_start_is_truncated_normal():
    config = small_config(hidden_size=120, initializer_range=0.02)
    values = pretraining_model(config, 1).variables["bert/pooler/dense/kernel"].numpy()
    assert np.abs(values).max() <= 0.04
    assert abs(values.std() - 0.0176) < 0.0005
    assert abs(values.mean()) < 0.0005


def test_unpacked_batch_is_packs_of_depth_one():
    sequences = [[sequence] for pack in random_packs(3, [[7, 11, 2]]) for sequence in pack]
    expected = join_sequences(sequences, 13, 5, 1)
    names = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    unpacked = {name: expected[name] for name in (*names, "next_sentence_labels")}
    packed = as_packed({**unpacked, "next_sentence_labels": unpacked["next_sentence_labels"].reshape(-1)})
    assert packed.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(packed[name], value)
        assert packed[name].dtype == value.dtype
    assert as_packed(packed) == packed


def test_row_of_padding_counts_as_no_sequence():
    batch = join_sequences([[], *random_packs(3, [[7]])], 13, 5, 1)
    packed = as_packed({name: batch[name] for name in batch if name not in ("positions", "next_sentence_weights")})
    np.testing.assert_array_equal(packed["next_sentence_weights"], [[0], [1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": None}, "positions is missing"),
        ({"input_ids": tf.zeros([2, 31], tf.int64)}, "input_ids is int64, it must be int32"),
        ({"segment_ids": tf.zeros([2, 30], tf.int32)}, "segment_ids has the shape .* but L is 31"),
        ({"masked_lm_ids": tf.zeros([34], tf.int32)}, r"must be \[B, Q\]"),
    ],
)
def test_batches_that_do_not_fit_are_refused(change, message):
    batch = {name: value for name, value in {**small_batch(), **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        check_batch(batch, small_config())


def test_unknown_batch_size_is_refused():
    model = small_model()
    specs = {name: tf.TensorSpec([None, *value.shape[1:]], value.dtype) for name, value in small_batch().items()}
    with pytest.raises(InputError, match="every size known"):
        tf.function(model.forward, autograph=False).get_concrete_function(specs)


def test_too_long_packs_are_refused():
    with pytest.raises(InputError, match="max_position_embeddings is 30"):
        small_model(max_position_embeddings=30).forward(small_batch())


def test_sizes_come_from_the_batch():
    sizes = check_batch(small_batch(masked_slots=19, depth=7), small_config())
    assert sizes == (2, 31, 19, 7)
    outputs = small_model().forward(small_batch(masked_slots=19, depth=7))
    shapes = [tuple(part.shape) for part in outputs]
    assert shapes == [(2, 7, 21), (2, 19, 53), (2, 7, 2)]


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
    with pytest.raises(InputError, match="only bert"):
        BertConfig.from_json({"model_type": "roberta"})


def test_unknown_weights_are_refused():
    with pytest.raises(InputError, match=r"bert/extra is \[3\] there, absent here"):
        small_model().load_values({"bert/extra": np.zeros(3)})
    with pytest.raises(InputError, match=r"output_bias is \[3\] there, \[53\] here"):
        small_model().load_values({"cls/predictions/output_bias": np.zeros(3)})


@pytest.mark.parametrize(
    ("attention", "masked_slots", "is_cheaper"),
    [("causal", 27, True), ("bidirectional", 28, False)],
)
def test_last_layer_is_computed_where_it_is_read(attention, masked_slots, is_cheaper):
    """Of 31 places, 3 are read for sequences: with 28 masked slots as many are read as there are."""
    model, batch = small_model(attention=attention, compute_dtype="float64"), small_batch(masked_slots)
    variables = list(model.variables.values())
    losses, gradients, flops = [], [], []
    for run in (model.forward, lambda batch: outputs_of_every_token(model.network(), batch)[1]):
        with tf.GradientTape() as tape:
            sums = pretraining_sums(run(batch), batch, "token")
            losses.append(sums[0] + sums[2])
        gradients.append(tape.gradient(losses[-1], variables))
        flops.append(matrix_flops(tf.function(run, autograph=False).get_concrete_function(batch).graph))
    agree(losses[0], losses[1], 1e-13)
    for read, whole in zip(*gradients, strict=True):
        agree(read, whole, 1e-10)
    assert (flops[0] < flops[1]) == is_cheaper


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_repeats_itself_and_changes_with_the_seed(compiled):
    model, batch = small_model(compiled=compiled), small_batch()
    run = tf.function(lambda seed: model.forward(batch, seed).masked_lm_logits_BQV, autograph=False)
    first, again, other = (run(tf.constant(seed, tf.int32)).numpy() for seed in ([1, 2], [1, 2], [1, 3]))
    identical(again, first)
    assert np.abs(first - other).max() > 0.1
    assert np.abs(first - model.forward(batch).masked_lm_logits_BQV.numpy()).max() > 0.1


def test_bfloat16_is_near_float32():
    batch = join_sequences(random_packs(1, LENGTHS), 31, 17, 3)
    wide, losses, gradients = small_model().trial(batch, "token")
    narrow, narrow_losses, narrow_gradients = small_model(compute_dtype="bfloat16").trial(batch, "token")
    assert all(part.dtype == np.float32 for part in narrow.values())
    for placed in split_packs(batch):
        for name, where in (("hidden_states", placed.positions), ("masked_lm_logits", placed.masked_slots)):
            one, other = (outputs[name][placed.pack, where] for outputs in (wide, narrow))
            agree(one, other, 0.1, scale=1.0)
    for name, loss in losses.items():
        agree(narrow_losses[name], loss, 0.02)
    for name, gradient in gradients.items():
        assert narrow_gradients[name].dtype == np.float32
        assert np.linalg.norm(narrow_gradients[name] - gradient) <= 0.1 * np.linalg.norm(gradient), name
