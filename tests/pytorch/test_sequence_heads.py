"""Heads with one output for each sequence, and losses that add up for heads with one output for each token."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from tests.builders.agree import agree

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers")

from gaudi_bert.pytorch import (  # noqa: E402
    PackCollator,
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


def rows(packs: int = 4) -> list[dict]:
    random, made = np.random.default_rng(2), []
    for number in range(packs):
        lengths = np.array([(7, 11, 5), (20,), (3, 3, 9, 8), (12, 11)][number % 4])
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        pads = 24 - len(numbers)
        ids = random.integers(5, 60, len(numbers))
        labelled = number != 1  # a pack without labels
        made.append(
            {
                "input_ids": np.pad(ids, (0, pads)),
                "position_ids": np.concatenate([np.arange(each) for each in (*lengths, pads)]),
                "sequence_ids": np.pad(numbers, (0, pads)),
                "seq_lens": lengths,
                "labels": np.pad(np.where((ids % 3 == 0) & labelled, ids % 4, -100), (0, pads), constant_values=-100),
                "label": random.integers(0, 4, len(lengths)),
                "score": random.normal(size=len(lengths)).astype(np.float32),
            }
        )
    return made


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
    found = packed(**model_inputs(batch))
    assert found.logits.shape == (4, 5, labels)
    alone, losses = [], []
    for number, row in enumerate(rows()):
        ends = np.cumsum(row["seq_lens"])
        for sequence, (first, last) in enumerate(zip(ends - row["seq_lens"], ends, strict=True)):
            label = torch.tensor(row[column][sequence : sequence + 1])
            one = plain(torch.tensor(row["input_ids"][None, first:last]), labels=label)
            alone.append(one.logits[0] - found.logits[number, sequence])
            losses.append(one.loss)
    assert len(alone) == 10
    agree(torch.stack(alone).detach(), torch.zeros(10, labels), 1e-5, scale=1.0)
    agree(found.loss.item(), torch.stack(losses).mean().item(), 1e-5)


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


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForTokenClassification"])
def test_micro_batches_add_up_to_one_large_batch_for_any_head(kind: str) -> None:
    model = model_of(getattr(transformers, kind), num_labels=4)
    collator = PackCollator(model=model)
    large, small = collator(rows()), [collator(rows()[number : number + 1]) for number in range(4)]
    counts = update_counts(small)
    assert counts.tolist() == update_counts([large]).tolist()
    one = gradients(model, [update_loss(model, large, counts)])
    parts = [update_loss(model, batch, counts) for batch in small]
    agree(sum(parts).item(), model(**model_inputs(large)).loss.item(), 1e-6)
    assert parts[1].item() == 0  # no label, and still a gradient
    for found, wanted in zip(gradients(model, parts), one, strict=True):
        agree(found, wanted, 1e-5, scale=1.0)


def gradients(model, losses) -> list:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_what_cannot_work_is_refused_in_one_line() -> None:
    packed = model_of(PackedBertForSequenceClassification, num_labels=4)
    collated = PackCollator(model=packed, sequence_labels="score")(rows())
    refusals = {
        "sequence_labels = 'topic': the packs have no such column": lambda: PackCollator(sequence_labels="topic")(rows()),
        "leave one of both out": lambda: PackCollator(sequence_labels="label", gather_heads=True),
        "num_labels = 4: the labels are numbers with a fraction": lambda: packed(**model_inputs(collated)),
        "the batch has no labels": lambda: update_counts([{"input_ids": 1}]),
    }
    for message, refused in refusals.items():
        with pytest.raises(InputError, match=message) as caught:
            refused()
        assert "\n" not in str(caught.value)
