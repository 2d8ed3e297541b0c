"""The heads that gather: the losses and gradients of our TensorFlow trainer, and of one large batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from tests.builders import training_data as data
from tests.builders.agree import agree

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tensorflow", reason="TENSORFLOW MISSING: the heads are compared with those of our trainer")

from gaudi_bert.model.bert import BertForPretraining  # noqa: E402
from gaudi_bert.model.config import BertConfig  # noqa: E402
from gaudi_bert.model.equivalence import gradients_of  # noqa: E402
from gaudi_bert.model.huggingface import hugging_face_name, to_hugging_face  # noqa: E402
from gaudi_bert.pytorch import PackCollator, PackedBertForPreTraining, PackedDataset, PackedLoader, update_counts  # noqa: E402
from gaudi_bert.training.input.batches import TrainingOrder, ValueLimits, training_batches  # noqa: E402
from gaudi_bert.training.input.source import open_source  # noqa: E402

SEED, PACKS = 9, 12
CONFIG = BertConfig(
    vocab_size=data.VOCABULARY,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=40,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.15,
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Packs whose tokens are not [PAD]: PyTorch's embedding of padding has no gradient."""
    packs = [
        [replace(sequence, input_ids=np.maximum(sequence.input_ids, 1)) for sequence in pack] for pack in data.make_packs(29)
    ]
    return data.write_packed(tmp_path_factory.mktemp("packed") / "train", packs)


@pytest.fixture(scope="module")
def ours():
    return BertForPretraining(CONFIG, seed=3)


@pytest.fixture(scope="module")
def theirs(ours):
    model = PackedBertForPreTraining(transformers.BertConfig(**CONFIG.to_json()))
    values = to_hugging_face({name: variable.numpy() for name, variable in ours.variables_by_name.items()})
    missing, unknown = model.load_state_dict({name: torch.tensor(value) for name, value in values.items()}, strict=False)
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert not unknown
    model.tie_weights()
    return model


def batches(packed, batch_packs: int, **shapes) -> PackedLoader:
    collator = PackCollator("transformers-5", transformers.BertConfig(), gather_heads=True, **shapes)
    return PackedLoader(PackedDataset(packed, seed=SEED), batch_packs, collator)


def gradients(model, loss) -> dict:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_loss_and_gradients_are_those_of_our_tensorflow_trainer(packed, ours, theirs) -> None:
    source = open_source(packed)
    order = TrainingOrder(seed=SEED, shuffle_packs=4096)
    tensorflow_batch = next(training_batches(source, ValueLimits.of(source, CONFIG), PACKS, order))
    torch_batch = next(iter(batches(packed, PACKS, masked_slots=data.MASKED_SLOTS, depth=data.DEPTH)))
    np.testing.assert_array_equal(tensorflow_batch["input_ids"], torch_batch["input_ids"])  # the readers have one order
    outputs, losses, wanted = gradients_of(ours, tensorflow_batch, "token")
    found = theirs(**torch_batch)
    assert abs(float(found.loss.detach()) - sum(losses.values())) <= 1e-5
    used = tensorflow_batch["masked_lm_weights"] > 0
    assert np.abs(outputs.masked_lm_logits_BQV[used] - found.prediction_logits.detach().numpy()[used]).max() <= 1e-5
    theirs_gradients = gradients(theirs, found.loss)
    whole = np.sqrt(sum(float((value**2).sum()) for value in wanted.values()))
    for name, value in wanted.items():
        value = value.T if name.endswith("/kernel") else value
        difference = np.linalg.norm(theirs_gradients[hugging_face_name(name)].numpy() - value)
        scale = whole if name.endswith("key/bias") else np.linalg.norm(value)  # the gradient of a key bias is truly 0
        assert difference <= 1e-4 * scale, name


def test_the_state_is_that_of_bert_for_pretraining(theirs) -> None:
    plain = transformers.BertForPreTraining(theirs.config)
    assert list(plain.state_dict()) == list(theirs.state_dict())


def test_micro_batches_of_an_update_add_up_to_one_large_batch(packed, theirs) -> None:
    large = next(iter(batches(packed, 12)))
    small = list(islice(batches(packed, 4), 3))
    counts = update_counts(small)
    assert counts.tolist() == update_counts([large]).tolist()
    one = theirs(**large).loss
    parts = [theirs(**batch, num_items_in_batch=counts).loss for batch in small]
    agree(sum(parts).item(), one.item(), 1e-6)
    wanted, found = gradients(theirs, one), gradients(theirs, sum(parts))
    for name, value in wanted.items():
        assert float((found[name] - value).norm()) <= 1e-5 * max(float(value.norm()), 1e-3), name


def test_a_batch_without_masked_positions_has_a_loss_of_its_sentences_alone(packed, theirs) -> None:
    batch = next(iter(batches(packed, 3)))
    loss = theirs(**{**batch, "masked_lm_labels": torch.full_like(batch["masked_lm_labels"], -100)}).loss
    assert 0 < float(loss) < float(theirs(**batch).loss)
    assert theirs(**{name: value for name, value in batch.items() if "label" not in name}).loss is None
