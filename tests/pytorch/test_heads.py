"""Heads that gather, against our TensorFlow trainer and each sequence alone; losses that add up to one large batch's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from tests.builders import training_data as data
from tests.builders.agree import agree

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tensorflow", reason="TENSORFLOW MISSING: the heads are compared with those of our trainer")

from gaudi_bert.model.config import BertConfig  # noqa: E402
from gaudi_bert.pytorch import (  # noqa: E402
    PackCollator,
    PackedBertForPreTraining,
    PackedBertForSequenceClassification,
    PackedDataset,
    PackedLoader,
    model_inputs,
    update_counts,
    update_loss,
)
from gaudi_bert.training.input import (  # noqa: E402
    TrainingOrder,
    open_source,
    training_batches,
)
from gaudi_bert.training.weights import to_hugging_face  # noqa: E402
from tests.builders.model_packs import pretraining_model  # noqa: E402

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
    return pretraining_model(CONFIG, 3)


@pytest.fixture(scope="module")
def theirs(ours):
    model = PackedBertForPreTraining(transformers.BertConfig(**CONFIG.to_json()))
    values = to_hugging_face(ours.values())
    missing, unknown = model.load_state_dict({name: torch.tensor(value) for name, value in values.items()}, strict=False)
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert not unknown
    assert list(transformers.BertForPreTraining(model.config).state_dict()) == list(model.state_dict())
    model.tie_weights()
    return model


def batches(packed, batch_packs: int, **shapes) -> PackedLoader:
    collator = PackCollator("transformers-5", transformers.BertConfig(), gather_heads=True, **shapes)
    return PackedLoader(PackedDataset(packed, seed=SEED), batch_packs, collator)


def gradients(model, loss) -> dict:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_loss_and_gradients_are_those_of_our_tensorflow_trainer(packed, ours, theirs) -> None:
    source = open_source(packed)
    order = TrainingOrder(seed=SEED, shuffle_packs=4096)
    tensorflow_batch = next(training_batches(source, CONFIG, PACKS, order))
    torch_batch = next(iter(batches(packed, PACKS, masked_slots=data.MASKED_SLOTS, depth=data.DEPTH)))
    np.testing.assert_array_equal(tensorflow_batch["input_ids"], torch_batch["input_ids"])  # the readers have one order
    outputs, losses, expected = ours.trial(tensorflow_batch, "token")
    actual = theirs(**torch_batch)
    assert abs(float(actual.loss.detach()) - sum(losses.values())) <= 1e-5
    used = tensorflow_batch["masked_lm_weights"] > 0
    assert np.abs(outputs["masked_lm_logits"][used] - actual.prediction_logits.detach().numpy()[used]).max() <= 1e-5
    theirs_gradients = gradients(theirs, actual.loss)
    whole = np.sqrt(sum(float((value**2).sum()) for value in expected.values()))
    for (name, value), theirs_name in zip(expected.items(), to_hugging_face(expected), strict=True):
        value = value.T if name.endswith("/kernel") else value
        difference = np.linalg.norm(theirs_gradients[theirs_name].numpy() - value)
        scale = whole if name.endswith("key/bias") else np.linalg.norm(value)  # the gradient of a key bias is truly 0
        assert difference <= 1e-4 * scale, name


def test_a_batch_without_masked_positions_has_a_loss_of_its_sentences_alone(packed, theirs) -> None:
    batch = next(iter(batches(packed, 3)))
    loss = theirs(**{**batch, "masked_lm_labels": torch.full_like(batch["masked_lm_labels"], -100)}).loss
    assert 0 < float(loss) < float(theirs(**batch).loss)
    assert theirs(**{name: value for name, value in batch.items() if "label" not in name}).loss is None


# --- heads with one output for each sequence, and losses of heads with one output for each token

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}


def rows() -> list[dict]:
    random, created = np.random.default_rng(2), []
    for number, lengths in enumerate(map(np.array, ((7, 11, 5), (20,), (3, 3, 9, 8), (12, 11)))):
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        pads = 24 - len(numbers)
        ids = random.integers(5, 60, len(numbers))
        labelled = number != 1  # a pack without labels
        created.append(
            {
                "input_ids": np.pad(ids, (0, pads)),
                "token_type_ids": np.zeros(24, np.int64),
                "position_ids": np.concatenate([np.arange(each) for each in (*lengths, pads)]),
                "sequence_ids": np.pad(numbers, (0, pads)),
                "seq_lens": lengths,
                "labels": np.pad(np.where((ids % 3 == 0) & labelled, ids % 4, -100), (0, pads), constant_values=-100),
                "label": random.integers(0, 4, len(lengths)),
                "next_sentence_labels": np.arange(len(lengths)) % 2,
                "score": random.normal(size=len(lengths)).astype(np.float32),
            }
        )
    return created


def model_of(kind, **settings):
    torch.manual_seed(3)
    return kind(transformers.BertConfig(**SIZES, **settings)).eval()


@pytest.mark.parametrize(("labels", "column"), [(4, "label"), (1, "score")])
def test_an_output_for_each_sequence_is_that_of_the_sequence_alone(labels: int, column: str) -> None:
    plain = model_of(transformers.BertForSequenceClassification, num_labels=labels)
    packed = model_of(PackedBertForSequenceClassification, num_labels=labels)
    assert list(plain.state_dict()) == list(packed.state_dict())
    packed.load_state_dict(plain.state_dict())
    batch = PackCollator(model=packed, sequence_labels=column, depth=5)(rows())
    actual = packed(**model_inputs(batch))
    assert actual.logits.shape == (4, 5, labels)
    alone, losses = [], []
    for number, row in enumerate(rows()):
        ends = np.cumsum(row["seq_lens"])
        for sequence, (first, last) in enumerate(zip(ends - row["seq_lens"], ends, strict=True)):
            label = torch.tensor(row[column][sequence : sequence + 1])
            one = plain(torch.tensor(row["input_ids"][None, first:last]), labels=label)
            alone.append(one.logits[0] - actual.logits[number, sequence])
            losses.append(one.loss)
    assert len(alone) == 10
    agree(torch.stack(alone).detach(), torch.zeros(10, labels), 1e-5, scale=1.0)
    agree(actual.loss.item(), torch.stack(losses).mean().item(), 1e-5)


def test_a_head_with_one_output_for_a_row_is_refused() -> None:
    for kind in (transformers.BertForSequenceClassification, transformers.BertForQuestionAnswering):
        model = model_of(kind, num_labels=2)
        with pytest.raises(InputError, match=f"{kind.__name__}: its head gives one output for a row.*use PackedBert"):
            PackCollator(model=model)
    regression = model_of(transformers.BertForSequenceClassification, num_labels=1)
    batch = PackCollator(model=regression.config)(rows())
    batch["labels"] = batch["labels"].float()  # of any shape: a regression broadcasts them in silence
    with pytest.raises(InputError, match="its head gives one output for a row"):
        update_loss(regression, batch, torch.ones(1))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (transformers.BertForMaskedLM, {}),
        (transformers.BertForTokenClassification, {}),
        (PackedBertForSequenceClassification, {"sequence_labels": "label"}),
        (PackedBertForPreTraining, {"gather_heads": True}),
    ],
)
def test_micro_batches_and_processes_add_up_to_one_large_batch_for_any_head(kind: type, options: dict) -> None:
    model = model_of(kind, num_labels=4)
    collator = PackCollator(model=model, **options)
    large, small = collator(rows()), [collator(rows()[number : number + 1]) for number in range(4)]
    counts = update_counts(small)
    assert counts.tolist() == update_counts([large]).tolist()
    one = gradients(model, update_loss(model, large, counts))
    parts = [update_loss(model, batch, counts) for batch in small]
    agree(sum(parts).item(), model(**model_inputs(large)).loss.item(), 1e-6)
    if not options:
        assert parts[1].item() == 0  # no label, and still a gradient
    agree(update_loss(model, large, counts, 3).item(), 3 * sum(parts).item(), 1e-6)  # gradients of three are averaged
    for name, actual in gradients(model, sum(parts)).items():
        agree(actual, one[name], 1e-5, scale=1.0)


def test_what_cannot_work_is_refused_in_one_line() -> None:
    packed = model_of(PackedBertForSequenceClassification, num_labels=4)
    collated = PackCollator(model=packed, sequence_labels="score")(rows())
    refusals = {
        "sequence_labels = 'topic': the packs have no such column": lambda: PackCollator(sequence_labels="topic")(rows()),
        "omit one of them": lambda: PackCollator(sequence_labels="label", gather_heads=True),
        "num_labels = 4: the labels are numbers with a fraction": lambda: packed(**model_inputs(collated)),
        "the batch has no labels": lambda: update_counts([{"input_ids": 1}]),
    }
    for message, refused in refusals.items():
        with pytest.raises(InputError, match=message) as caught:
            refused()
        assert "\n" not in str(caught.value)
