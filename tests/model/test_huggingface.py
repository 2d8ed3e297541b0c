"""Against someone else's BERT: `transformers` (PyTorch), with trained weights on real text."""

from __future__ import annotations

import json
from pydoc_data.topics import topics

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines.tensorflow.bert import outputs_of_every_token
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.huggingface import from_hugging_face, hugging_face_name, to_hugging_face
from gaudi_bert.model.sequences import Sequence, join_sequences, split_packs
from tests.builders.agree import agree, identical
from tests.builders.effort import LONG
from tests.builders.engine_models import pretraining_model
from tests.builders.model_packs import random_packs, small_config, small_model

BOUND = 1e-4
EMPTY = np.zeros(0, np.int32)


@pytest.fixture(scope="module")
def english(minilm) -> list[Sequence]:
    """Pairs of paragraphs of the documentation that every CPython carries, tokenised as the model was trained."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found = []
    for name in sorted(topics):
        paragraphs = [paragraph for paragraph in topics[name].split("\n\n") if 60 < len(paragraph) < 150]
        for first, second in zip(paragraphs[::2], paragraphs[1::2], strict=False):
            encoded = tokenizer.encode(first, second)
            if len(encoded.ids) <= 72:
                segments = np.array(encoded.type_ids, np.int32)
                found.append(Sequence(np.array(encoded.ids, np.int32), segments, EMPTY, EMPTY, 0))
    assert len(found) > 20
    return found


def theirs_alone(model, sequence: Sequence):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(sequence.input_ids[np.newaxis], dtype=torch.long),
            token_type_ids=torch.tensor(sequence.segment_ids[np.newaxis], dtype=torch.long),
        )


@pytest.mark.repeated
def test_trained_hidden_states_equal_those_of_transformers(minilm, english):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.numpy")
    config = BertConfig.from_json(json.loads((minilm / "config.json").read_text()))
    ours = pretraining_model(config, None)
    ours.load_values(from_hugging_face(safetensors.load_file(minilm / "model.safetensors"), config))
    theirs = transformers.BertModel.from_pretrained(minilm).eval()
    for depth in (1, 3, 7) if LONG else (7,):
        packs = [english[start : start + depth] for start in range(0, 14, depth)]
        length = max(sum(sequence.length for sequence in pack) for pack in packs) + 5
        batch = join_sequences(packs, length, 1, depth)
        tensors = {name: tf.constant(value) for name, value in batch.items()}
        hidden_BLH, outputs = outputs_of_every_token(ours.network(), tensors)[0], ours.forward(tensors)
        for placed in split_packs(batch):
            alone = theirs_alone(theirs, placed.sequence)
            hidden, pooled = alone.last_hidden_state[0].numpy(), alone.pooler_output[0].numpy()
            assert np.abs(hidden).max() > 1
            agree(hidden_BLH[placed.pack].numpy()[placed.positions], hidden, BOUND, scale=1.0)
            agree(outputs.pooled_output_BSH[placed.pack, placed.number - 1].numpy(), pooled, BOUND, scale=1.0)


def test_pretraining_heads_equal_those_of_transformers():
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    ours = small_model()
    values = ours.values()
    their_config = transformers.BertConfig(**{k: v for k, v in ours.config.to_json().items() if k != "attention"})
    theirs = transformers.BertForPreTraining(their_config).eval()
    state = {name: torch.tensor(value) for name, value in to_hugging_face(values).items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert not unexpected
    theirs.tie_weights()
    sequences = [sequence for pack in random_packs(3, [[11, 7, 19]]) for sequence in pack]
    batch = join_sequences([sequences], 37, 13, 3)
    outputs = ours.forward({name: tf.constant(value) for name, value in batch.items()})
    for placed in split_packs(batch):
        expected = theirs_alone(theirs, placed.sequence)
        words = expected.prediction_logits[0].numpy()[placed.sequence.masked_positions]
        ours = outputs.masked_lm_logits_BQV[0].numpy()[placed.masked_slots]
        agree(ours, words, 1e-5, scale=1.0)
        sentence = expected.seq_relationship_logits[0].numpy()
        agree(outputs.next_sentence_logits_BS2[0, placed.number - 1], sentence, 1e-5, scale=1.0)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("bert.encoder.layer.1.output.dense.bias"), "output.dense.bias is missing"),
        (lambda state: state.update({"cls.predictions.bias": np.zeros(3)}), "has the shape"),
        (lambda state: state.update({"bert.extra": np.zeros(3)}), "bert.extra is unknown"),
        (lambda state: state.update({"cls.predictions.decoder.weight": np.zeros((53, 21))}), "only tied"),
    ],
)
def test_other_weights_are_refused(change, message):
    state = to_hugging_face(small_model().values())
    change(state)
    with pytest.raises(InputError, match=message):
        from_hugging_face(state, small_config())
