"""What a model is: its config, variables, batches, packs and sequences; and its names in `transformers`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.model.config import BertConfig, ParameterSpec, initial_value, parameter_count, parameter_specs, shapes_of
from gaudi_bert.model.features import UNPACKED_FEATURES, Sequence, as_packed, check_batch, join_sequences, split_packs
from gaudi_bert.model.huggingface import from_hugging_face, hugging_face_name, to_hugging_face
from tests.builders.agree import identical
from tests.builders.model_packs import random_packs, small_config, small_model


def small_batch(masked_slots: int = 17, depth: int = 3) -> dict[str, np.ndarray]:
    return join_sequences(random_packs(1, [[11, 5, 13], [17, 9]]), 31, masked_slots, depth)


def test_variables_have_googles_names_and_shapes_and_bert_base_its_110_million_parameters():
    shapes = shapes_of(parameter_specs(small_config()))
    assert shapes["bert/encoder/layer_1/attention/self/query/kernel"] == (21, 21)
    assert shapes["bert/encoder/layer_0/intermediate/dense/kernel"] == (21, 35)
    assert shapes["bert/embeddings/LayerNorm/gamma"] == (21,)
    assert shapes["cls/predictions/output_bias"] == (53,)
    assert shapes["cls/seq_relationship/output_weights"] == (2, 21)
    assert len(shapes) == 5 + 16 * 2 + 2 + 5 + 2
    assert parameter_count(small_config()) == sum(int(np.prod(shape)) for shape in shapes.values())
    assert parameter_count(BertConfig()) == 110_106_428


def test_noise_depends_on_seed_and_name_alone_and_is_truncated_normal():
    spec = ParameterSpec((120, 120), "normal")
    one, again, other_seed, other_name = (
        initial_value(name, spec, 0.02, seed) for name, seed in (("a", 7), ("a", 7), ("a", 8), ("b", 7))
    )
    np.testing.assert_array_equal(again, one)
    for other in (other_seed, other_name):
        assert not np.array_equal(other, one)
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
    for change, message in (({"model_type": "roberta"}, "only bert"), ({"add_cross_attention": True}, "second input")):
        with pytest.raises(InputError, match=message):
            BertConfig.from_json({**stored, **change})


# --- batches


def test_unpacked_batch_is_packs_of_depth_one_and_a_row_of_padding_no_sequence():
    sequences = [[sequence] for pack in random_packs(3, [[7, 11, 2]]) for sequence in pack]
    expected = join_sequences([*sequences, []], 13, 5, 1)
    unpacked = {name: expected[name] for name in UNPACKED_FEATURES}
    packed = as_packed({**unpacked, "next_sentence_labels": unpacked["next_sentence_labels"].reshape(-1)})
    assert packed.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(packed[name], value, strict=True)
    assert packed["next_sentence_weights"].tolist() == [[1], [1], [1], [0]]
    assert as_packed(packed) == packed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": None}, "positions is missing"),
        ({"input_ids": np.zeros((2, 31), np.int64)}, "input_ids is int64, it must be int32"),
        ({"segment_ids": np.zeros((2, 30), np.int32)}, "segment_ids has the shape .* but L is 31"),
        ({"masked_lm_ids": np.zeros(34, np.int32)}, r"must be \[B, Q\]"),
    ],
)
def test_batches_that_do_not_fit_are_refused(change, message):
    batch = {name: value for name, value in {**small_batch(), **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        check_batch(batch, small_config())


def test_sizes_come_from_the_batch_and_must_fit_the_model():
    assert check_batch(small_batch(masked_slots=19, depth=7), small_config()) == (2, 31, 19, 7)
    with pytest.raises(InputError, match="max_position_embeddings is 30"):
        check_batch(small_batch(), small_config(max_position_embeddings=30))


# --- packs apart and together again


def sequence(ids, segments, positions, masked_ids, label) -> Sequence:
    return Sequence(*(np.array(values, np.int32) for values in (ids, segments, positions, masked_ids)), label)


def test_join_by_hand():
    pack = [sequence([7, 8, 9], [0, 0, 1], [0, 2], [4, 5], 1), sequence([6, 3], [0, 1], [1], [2], 0)]
    expected = {
        "input_ids": [7, 8, 9, 6, 3, 0, 0],
        "input_mask": [1, 1, 1, 2, 2, 0, 0],
        "segment_ids": [0, 0, 1, 0, 1, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 0],
        "masked_lm_positions": [0, 2, 4, 0],
        "masked_lm_ids": [4, 5, 2, 0],
        "masked_lm_weights": [1, 1, 2, 0],
        "next_sentence_positions": [0, 3, 0],
        "next_sentence_labels": [1, 0, 0],
        "next_sentence_weights": [1, 1, 0],
    }
    assert {name: value[0].tolist() for name, value in join_sequences([pack], 7, 4, 3).items()} == expected


def test_split_is_the_inverse_of_join():
    packs = random_packs(1, [[11, 5, 13], [], [17, 9]])
    placed = split_packs(join_sequences(packs, 31, 17, 4))
    where = [(0, 1, 0), (0, 2, 11), (0, 3, 16), (2, 1, 0), (2, 2, 17)]
    assert [(each.pack, each.number, each.start) for each in placed] == where
    for each, original in zip(placed, [original for pack in packs for original in pack], strict=True):
        for name, value in vars(original).items():
            np.testing.assert_array_equal(getattr(each.sequence, name), value)


@pytest.mark.parametrize(
    ("sizes", "message"), [((15, 9, 2), "16 tokens"), ((16, 1, 2), "masked positions"), ((16, 9, 1), "2 sequences")]
)
def test_packs_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        join_sequences(random_packs(1, [[11, 5]]), *sizes)


def test_split_numbers_are_refused():
    batch = join_sequences(random_packs(1, [[3, 2]]), 7, 4, 3)
    batch["input_mask"][0, 6] = 1
    with pytest.raises(InputError, match="missing or split"):
        split_packs(batch)


# --- the names that `transformers` has


def test_names_and_back_to_the_bit_also_by_old_names_with_tied_copies():
    assert hugging_face_name("bert/encoder/layer_11/attention/output/LayerNorm/gamma") == (
        "bert.encoder.layer.11.attention.output.LayerNorm.weight"
    )
    assert hugging_face_name("bert/embeddings/word_embeddings") == "bert.embeddings.word_embeddings.weight"
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
