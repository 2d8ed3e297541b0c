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

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array
from gaudi_bert.engines.protocol import Model
from gaudi_bert.model.heads import Loss
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


def compare_packed_with_unpacked(model: Model, packed: BatchArrays, loss: Loss = "token") -> Differences:
    """Run `packed` (packed features as arrays) and the same sequences one to a row, and compare."""
    placed = split_packs(packed)
    length, slots = packed["input_ids"].shape[1], packed["masked_lm_ids"].shape[1]
    ours = model.trial(packed, loss)
    single = model.trial(join_sequences([[each.sequence] for each in placed], length, slots, 1), loss)
    outputs: dict[str, tuple[float, float]] = {}
    for row, each in enumerate(placed):
        alone = PlacedSequence(each.sequence, row, 1, 0, np.arange(len(each.masked_slots)))
        pairs = zip(_outputs_of(ours.outputs, each), _outputs_of(single.outputs, alone), strict=True)
        for (name, mine), (_, theirs) in pairs:
            difference, largest = outputs.get(name, (0.0, 0.0))
            outputs[name] = (max(difference, _largest(mine - theirs)), max(largest, _largest(theirs)))
    return Differences(
        outputs=outputs,
        losses={name: (abs(ours.losses[name] - alone), abs(alone)) for name, alone in single.losses.items()},
        gradients={name: (_norm(ours.gradients[name] - alone), _norm(alone)) for name, alone in single.gradients.items()},
        sequences=len(placed),
        packs=len(packed["input_ids"]),
    )


def probe_leaks(model: Model, vocabulary_size: int, packed: BatchArrays, chosen: int = 0) -> _LeakReport:
    """Change every token of one sequence in each pack; compare all outputs of all others, bit for bit.

    Of a pack of k sequences, number `chosen` modulo k is changed.
    """
    placed = split_packs(packed)
    per_pack = np.bincount([each.pack for each in placed], minlength=len(packed["input_ids"]))
    is_chosen = [each.number - 1 == chosen % int(per_pack[each.pack]) for each in placed]
    changed_ids = packed["input_ids"].copy()
    for each, changes in zip(placed, is_chosen, strict=True):
        if changes:
            changed_ids[each.pack, each.positions] = (each.sequence.input_ids + 1) % vocabulary_size
    before, after = (model.trial(batch, "token").outputs for batch in (packed, {**packed, "input_ids": changed_ids}))
    leaks, moved = 0, True
    for each, changes in zip(placed, is_chosen, strict=True):
        pairs = zip(_outputs_of(before, each), _outputs_of(after, each), strict=True)
        same = [one.tobytes() == other.tobytes() for (_, one), (_, other) in pairs if one.size]
        if changes:
            moved = moved and not any(same)
        else:
            leaks += not all(same)
    return _LeakReport(len(placed) - sum(is_chosen), leaks, moved)


def _outputs_of(outputs: dict[str, Float32Array], placed: PlacedSequence) -> Iterator[tuple[str, Float32Array]]:
    """The outputs that belong to one sequence."""
    slots = {"hidden_states": placed.positions, "masked_lm_logits": placed.masked_slots}
    for name, values in outputs.items():
        of_pack = values[placed.pack]
        yield name, of_pack[slots[name]] if name in slots else of_pack[placed.number - 1]


def _largest(values: Float32Array) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _norm(values: Float32Array) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))
