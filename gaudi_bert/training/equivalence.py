"""The proof that packing changes nothing, for any weights and any packs.

The same sequences go through the model twice: as packs, and one to a row. Outputs, losses and the gradient of
every variable must agree to rounding (Krell et al., 2021, section 3.2: "the behavior of the model is the
same"). The leak probe is sharper: all tokens of one sequence of each pack are changed, and not one bit of any
other sequence's outputs may change. Outputs are those of training, where the last layer is computed for the positions
that the heads read, and in addition the hidden states of all tokens.

Letters: B packs, L positions, Q masked slots, S depth, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from gaudi_bert.common.arrays import BatchArrays, Float32Array
from gaudi_bert.model.bert import BertForPretraining, PretrainingOutputs
from gaudi_bert.model.losses import Loss, pretraining_sums
from gaudi_bert.model.sequences import PlacedSequence, join_sequences, split_packs


@dataclass(frozen=True)
class Differences:
    """How far packed is from unpacked; each output's largest absolute difference, and its largest absolute value.

    `gradients` holds, for each variable, the norm of the difference and the norm of the gradient.
    """

    outputs: dict[str, tuple[float, float]]
    losses: dict[str, tuple[float, float]]
    gradients: dict[str, tuple[float, float]]
    sequences: int
    packs: int


@dataclass(frozen=True)
class _LeakReport:
    """Of the leak probe: outputs of unchanged sequences that were compared, and how many of them changed by a bit."""

    sequences_compared: int
    leaks: int
    own_outputs_moved: bool


class _Outputs(NamedTuple):
    """A model's outputs for a batch, as arrays."""

    hidden_BLH: Float32Array
    heads: PretrainingOutputs


def compare_packed_with_unpacked(model: BertForPretraining, packed: BatchArrays, loss: Loss = "token") -> Differences:
    """Run `packed` (packed features as arrays) and the same sequences one to a row, and compare."""
    placed = split_packs(packed)
    length, slots = packed["input_ids"].shape[1], packed["masked_lm_ids"].shape[1]
    unpacked = join_sequences([[each.sequence] for each in placed], length, slots, 1)
    packed_outputs, packed_losses, packed_gradients = gradients_of(model, packed, loss)
    single_outputs, single_losses, single_gradients = gradients_of(model, unpacked, loss)
    ours_packed, ours_single = (
        _Outputs(_hidden_states(model, batch), heads)
        for batch, heads in ((packed, packed_outputs), (unpacked, single_outputs))
    )
    outputs: dict[str, tuple[float, float]] = {}
    for row, each in enumerate(placed):
        alone = PlacedSequence(each.sequence, row, 1, 0, np.arange(len(each.masked_slots)))
        for (name, ours), (_, theirs) in zip(_outputs_of(ours_packed, each), _outputs_of(ours_single, alone), strict=True):
            difference, largest = outputs.get(name, (0.0, 0.0))
            outputs[name] = (max(difference, _largest(ours - theirs)), max(largest, _largest(theirs)))
    return Differences(
        outputs=outputs,
        losses={name: (abs(packed_losses[name] - alone), abs(alone)) for name, alone in single_losses.items()},
        gradients={name: (_norm(packed_gradients[name] - alone), _norm(alone)) for name, alone in single_gradients.items()},
        sequences=len(placed),
        packs=len(packed["input_ids"]),
    )


def gradients_of(
    model: BertForPretraining, batch: BatchArrays, loss: Loss
) -> tuple[PretrainingOutputs, dict[str, float], dict[str, Float32Array]]:
    """Outputs (as arrays), both losses, and the gradient of their sum for every variable; no dropout."""
    tensors = _tensors(batch)
    names, variables = zip(*model.variables_by_name.items(), strict=True)
    with tf.GradientTape() as tape:
        outputs = model(tensors)
        sums = pretraining_sums(outputs, tensors, loss)
        masked_lm_loss = sums.masked_lm_sum / sums.masked_lm_weight
        next_sentence_loss = sums.next_sentence_sum / sums.next_sentence_weight
        total = masked_lm_loss + next_sentence_loss
    gradients = tape.gradient(total, variables)
    losses = {"masked_lm_loss": float(masked_lm_loss), "next_sentence_loss": float(next_sentence_loss)}
    arrays = PretrainingOutputs(*(output.numpy() for output in outputs))
    return arrays, losses, {name: gradient.numpy() for name, gradient in zip(names, gradients, strict=True)}


def probe_leaks(model: BertForPretraining, packed: BatchArrays, chosen: int = 0) -> _LeakReport:
    """Change every token of one sequence in each pack; compare all outputs of all others, bit for bit.

    Of a pack of k sequences, number `chosen` modulo k is changed.
    """
    placed = split_packs(packed)
    per_pack = np.bincount([each.pack for each in placed], minlength=len(packed["input_ids"]))
    is_chosen = [each.number - 1 == chosen % int(per_pack[each.pack]) for each in placed]
    changed_ids = packed["input_ids"].copy()
    for each, changes in zip(placed, is_chosen, strict=True):
        if changes:
            changed_ids[each.pack, each.positions] = (each.sequence.input_ids + 1) % model.config.vocab_size
    before, after = (
        _Outputs(_hidden_states(model, batch), PretrainingOutputs(*(output.numpy() for output in model(_tensors(batch)))))
        for batch in (packed, {**packed, "input_ids": changed_ids})
    )
    leaks, moved = 0, True
    for each, changes in zip(placed, is_chosen, strict=True):
        pairs = zip(_outputs_of(before, each), _outputs_of(after, each), strict=True)
        same = [one.tobytes() == other.tobytes() for (_, one), (_, other) in pairs if one.size]
        if changes:
            moved = moved and not any(same)
        else:
            leaks += not all(same)
    return _LeakReport(len(placed) - sum(is_chosen), leaks, moved)


def _tensors(batch: BatchArrays) -> dict[str, tf.Tensor]:
    return {name: tf.constant(value) for name, value in batch.items()}


def _hidden_states(model: BertForPretraining, batch: BatchArrays) -> Float32Array:
    hidden_BLH: Float32Array = model.with_hidden_states(_tensors(batch))[0].numpy()
    return hidden_BLH


def _outputs_of(outputs: _Outputs, placed: PlacedSequence) -> Iterator[tuple[str, Float32Array]]:
    """The outputs that belong to one sequence."""
    heads = outputs.heads
    yield "hidden_states", outputs.hidden_BLH[placed.pack, placed.positions]
    yield "pooled_output", heads.pooled_output_BSH[placed.pack, placed.number - 1]
    yield "masked_lm_logits", heads.masked_lm_logits_BQV[placed.pack, placed.masked_slots]
    yield "next_sentence_logits", heads.next_sentence_logits_BS2[placed.pack, placed.number - 1]


def _largest(values: Float32Array) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _norm(values: Float32Array) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))
