"""Heads that gather, against each sequence alone; losses that add up to those of one large batch."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from tests.builders.agree import agree

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers")

from torch.nn.functional import cross_entropy  # noqa: E402

from gaudi_bert.pytorch import (  # noqa: E402
    PackCollator,
    PackedBertForPreTraining,
    PackedBertForSequenceClassification,
    model_inputs,
    update_counts,
    update_loss,
)

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


def gradients(model, loss) -> dict:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def pair_of(plain_kind, packed_kind, **settings):
    """A model and its packed one, of the same names and weights."""
    plain, packed = (model_of(kind, **settings) for kind in (plain_kind, packed_kind))
    assert list(plain.state_dict()) == list(packed.state_dict())
    packed.load_state_dict(plain.state_dict())
    return plain, packed


def each_alone(plain) -> list[tuple]:
    """The outputs of each sequence as a row by itself, with its pack, its number in it, and its place there."""
    found = []
    for pack, row in enumerate(rows()):
        ends = np.cumsum(row["seq_lens"])
        for number, (first, last) in enumerate(zip(ends - row["seq_lens"], ends, strict=True)):
            found.append((plain(torch.tensor(row["input_ids"][None, first:last])), pack, number, slice(first, last)))
    assert len(found) == 10
    return found


@pytest.mark.parametrize(("labels", "column"), [(4, "label"), (1, "score")])
def test_an_output_for_each_sequence_is_that_of_the_sequence_alone(labels: int, column: str) -> None:
    kinds = transformers.BertForSequenceClassification, PackedBertForSequenceClassification
    plain, packed = pair_of(*kinds, num_labels=labels)
    actual = packed(**model_inputs(PackCollator(model=packed, sequence_labels=column, depth=5)(rows())))
    assert actual.logits.shape == (4, 5, labels)
    alone = each_alone(plain)
    logits = torch.cat([one.logits for one, *_ in alone])
    agree(torch.stack([actual.logits[pack, number] for _, pack, number, _ in alone]).detach(), logits.detach(), 1e-5)
    wanted = torch.from_numpy(np.concatenate([row[column] for row in rows()]))
    loss = cross_entropy(logits, wanted) if labels > 1 else (logits[:, 0] - wanted).square().mean()
    agree(actual.loss.item(), loss.item(), 1e-5)


def test_words_and_sentences_of_pretraining_are_those_of_each_sequence_alone() -> None:
    plain, packed = pair_of(transformers.BertForPreTraining, PackedBertForPreTraining)
    batch = PackCollator(model=packed, gather_heads=True, depth=5)(rows())
    actual, alone, created = packed(**model_inputs(batch)), each_alone(plain), rows()
    labels = [torch.tensor(created[pack]["labels"][place]) for _, pack, _, place in alone]
    words = torch.cat([one.prediction_logits[0, wanted >= 0] for (one, *_), wanted in zip(alone, labels, strict=True)])
    sentences = torch.cat([one.seq_relationship_logits for one, *_ in alone])
    agree(actual.prediction_logits[batch["masked_lm_labels"] >= 0].detach(), words.detach(), 1e-5, scale=1.0)
    found = torch.stack([actual.seq_relationship_logits[pack, number] for _, pack, number, _ in alone])
    agree(found.detach(), sentences.detach(), 1e-5, scale=1.0)
    second = torch.from_numpy(np.concatenate([row["next_sentence_labels"] for row in created]))
    of_words = torch.cat(labels)
    loss = cross_entropy(words, of_words[of_words >= 0]) + cross_entropy(sentences, second)
    agree(actual.loss.item(), loss.item(), 1e-5)
    expected = gradients(plain, loss)
    for name, gradient in gradients(packed, actual.loss).items():
        agree(gradient, expected[name], 1e-5, scale=1.0)
    none = {**batch, "masked_lm_labels": torch.full_like(batch["masked_lm_labels"], -100)}
    agree(packed(**none).loss.item(), cross_entropy(sentences, second).item(), 1e-5)
    assert packed(**{name: value for name, value in batch.items() if "label" not in name}).loss is None


def test_a_head_with_one_output_for_a_row_is_refused() -> None:
    for kind in (transformers.BertForSequenceClassification, transformers.BertForQuestionAnswering):
        model = model_of(kind, num_labels=2)
        with pytest.raises(InputError, match=f"{kind.__name__}: the head returns one output per row.*use PackedBert"):
            PackCollator(model=model)
    regression = model_of(transformers.BertForSequenceClassification, num_labels=1)
    batch = PackCollator(model=regression.config)(rows())
    batch["labels"] = batch["labels"].float()  # of any shape: a regression broadcasts them in silence
    with pytest.raises(InputError, match="the head returns one output per row"):
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
        "sequence_labels = 'topic': .*input_ids": lambda: PackCollator(sequence_labels="topic")(rows()),
        "omit one of them": lambda: PackCollator(sequence_labels="label", gather_heads=True),
        "num_labels = 4: .*floating-point": lambda: packed(**model_inputs(collated)),
        "the batch contains no labels": lambda: update_counts([{"input_ids": 1}]),
    }
    for message, refused in refusals.items():
        with pytest.raises(InputError, match=message):
            refused()
