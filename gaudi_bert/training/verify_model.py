"""Stage verify-model: check with a user's own weights that packing does not change what a model computes.

Random sequences pass through the model twice: packed, and with one sequence per row. Outputs, losses and the gradient of
every variable must agree up to float32 rounding. Then all tokens of one sequence in each pack are changed, and the outputs
of all other sequences must stay bit-identical. If no checkpoint is given, the weights are random numbers from a fixed seed.

A `transformers` folder with any kind of model is tried in the same way as by `finetune` (`encoders/packed_model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, Int32Array, WeightArrays
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import check_model_exists
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.config.values import Engine as EngineChoice
from gaudi_bert.engines import choose_engine, load_engine
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import Loss, PretrainingHead
from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint
from gaudi_bert.training.weights import local_weights

_OUTPUT_BOUND = 1e-5
_GRADIENT_BOUND = 1e-5
_ZERO_GRADIENT_BOUND = 1e-9
_LENGTH, _VOCABULARY, _PACKS, _DEPTH = 128, 997, 5, 8
_SEED = 12345
_Dtype = Literal["float32", "float64"]
# Maps the name of an output to its largest absolute difference and its largest absolute value, and the name of a gradient to
# the norm of its difference and the norm of the gradient.
_Differences = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class VerifyModelResult:
    """The result of the checks, all of which passed.

    Attributes:
        weights: The path of the weights, or "random".
        packs: The number of packs.
        sequences: The number of sequences in them.
        differences: The largest difference between packed and unpacked, by the name of the output or loss. "gradient" is the
            largest difference of a variable's gradient, relative to its norm.
        leak_comparisons: The number of sequences whose outputs stayed identical while another sequence of their pack
            changed.
    """

    weights: str
    packs: int
    sequences: int
    differences: dict[str, float]
    leak_comparisons: int

    def format_lines(self) -> list[str]:
        """Return the result as lines for the user."""
        packed = f"{format_count(self.sequences, 'sequence')} in {format_count(self.packs, 'pack')}"
        largest = max(difference for name, difference in self.differences.items() if name != "gradient")
        neighbours = f"{format_count(self.leak_comparisons, 'sequence')} next to a changed one did not change"
        return [
            f"packing changes nothing: {packed} give the outputs of single rows, to {largest:.1e}, and the gradients, to "
            f"{self.differences['gradient']:.1e}; {neighbours}"
        ]


def verify_model(*, checkpoint: Path | None, reporter: Reporter, engine: EngineChoice = "auto") -> VerifyModelResult:
    """Check that a model computes the same for packed and unpacked sequences.

    Args:
        checkpoint: A checkpoint, the folder of a run, or a `transformers` folder. None for random weights.
        reporter: Shows the details of the checks.
        engine: The engine that runs the model, or "auto".

    Raises:
        FailedError: The results differ by more than rounding.
        InputError: The weights cannot be read.
    """
    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=_LENGTH,
        initializer_range=0.1,
    )
    values: WeightArrays = {}
    with nullcontext() if checkpoint is None else local_weights(checkpoint) as weights:
        if weights is not None:
            check_model_exists(weights)
            if (weights / "config.json").is_file():  # a transformers folder with any kind of model
                from gaudi_bert.encoders.packed_model import (
                    verify_folder,
                )  # imported here, because it loads torch and transformers

                differences, count, sequences = verify_folder(weights, reporter.say)
                return VerifyModelResult(str(weights), count, sequences, differences, sequences - count)
            stored = read_checkpoint(find_checkpoint(weights))
            if "model" not in stored.settings:
                raise InputError(f"{weights}: holds no model settings; use a checkpoint that `train` wrote")
            config, values = BertConfig.from_json(stored.settings["model"]), stored.variables
    chosen = choose_engine(engine, key="--engine")
    reporter.say(f"verify-model: {chosen.format_choice()}")
    build, batch = (
        partial(load_engine(chosen.name).build_model, ModelSpec(config, PretrainingHead()), seed=_SEED),
        _packs(config),
    )

    def model_of(compute_dtype: _Dtype) -> Model:
        """Build the model with a compute dtype, and load the weights."""
        model = build(compute_dtype=compute_dtype)
        model.load_values(values)
        return model

    differences = _compare(model_of, batch, "sequence", reporter.say) | _compare(model_of, batch, "token", reporter.say)
    return VerifyModelResult(
        weights="random" if checkpoint is None else str(checkpoint),
        packs=len(batch["input_ids"]),
        sequences=len(split_packs(batch)),
        differences=differences,
        leak_comparisons=_check_leaks(model_of("float32"), config.vocab_size, batch, reporter.say),
    )


def _packs(config: BertConfig) -> BatchArrays:
    """Return packs of random sequences of various lengths, some with padding, packed by first-fit decreasing."""
    random, length = np.random.default_rng(_SEED), min(_LENGTH, config.max_position_embeddings)
    packs: list[list[Sequence]] = []
    sizes = sorted(random.integers(1, max(2, length // 2 + 1), 4 * _PACKS).tolist(), reverse=True)
    for number, size in enumerate(sizes):
        positions = np.unique(random.integers(0, size, 1 + size // 7))
        sequence = Sequence(
            input_ids=random.integers(0, config.vocab_size, size).astype(np.int32),
            segment_ids=(np.arange(size) * config.type_vocab_size // size).astype(np.int32),
            masked_positions=positions.astype(np.int32),
            masked_ids=random.integers(0, config.vocab_size, len(positions)).astype(np.int32),
            next_sentence_label=int(number % 3 < 2),  # equally frequent labels would nearly cancel a bias gradient
        )
        fitting = (pack for pack in packs if len(pack) < _DEPTH and sum(each.length for each in pack) + size <= length)
        pack = next(fitting, None)
        if pack is None:
            packs.append(pack := [])
        pack.append(sequence)
    slots = max(sum(len(sequence.masked_ids) for sequence in pack) for pack in packs)
    return join_sequences(packs, length, slots, max(map(len, packs)))


# --- Comparing packed with unpacked, for any weights and any packs (Krell et al., 2021, section 3.2: "the behavior of the
# model is the same")
#
# The compared outputs are those of training, for which the last layer is computed only at the positions that the heads read.
# In addition, the hidden states of all tokens are compared.


def _compare(
    model_of: Callable[[_Dtype], Model], batch: BatchArrays, loss: Loss, say: Callable[[str], None]
) -> dict[str, float]:
    """Check that outputs, losses and gradients of packed and unpacked sequences agree.

    Gradients that nearly cancel differ too much in float32, so they are computed again in float64.

    Args:
        model_of: Builds the model with a compute dtype.
        batch: The packs.
        loss: Whether the masked-LM loss is a mean over tokens or over sequences.
        say: Shows a line to the user.

    Returns:
        The largest differences, as in `VerifyModelResult`.

    Raises:
        FailedError: A difference is larger than allowed.
    """
    outputs, gradients = _compare_packed_with_unpacked(model_of("float32"), batch, loss)
    say(f"verify-model: {format_count(len(batch['input_ids']), 'pack')}, masked-LM loss per {loss}")
    for name, (difference, largest) in outputs.items():
        bound = _OUTPUT_BOUND * max(1.0, largest)
        say(f"verify-model:   {name}: differs by {difference:.1e} at most (allowed {bound:.1e})")
        if not difference <= bound:
            raise FailedError(f"{name}: packed and unpacked differ by {difference:.1e}, allowed is {bound:.1e}")
    shares = {name: _share(*norms) for name, norms in gradients.items()}
    unclear = [name for name, share in shares.items() if not share <= _GRADIENT_BOUND]
    if unclear:
        _, exact = _compare_packed_with_unpacked(model_of("float64"), batch, loss)
        shares |= {name: _share(*exact[name]) for name in unclear}
        say(f"verify-model:   gradients that nearly cancel in float32, compared in float64: {', '.join(unclear)}")
    worst = max(shares, key=lambda name: shares[name])
    comparison = f"gradient of {worst}: packed and unpacked differ by {shares[worst]:.1e} of its norm"
    say(f"verify-model:   {comparison} (allowed {_GRADIENT_BOUND:.0e}), the most of {len(shares)} variables")
    if not shares[worst] <= _GRADIENT_BOUND:
        raise FailedError(f"{comparison}, allowed is {_GRADIENT_BOUND:.0e}")
    return {**{name: difference for name, (difference, _) in outputs.items()}, "gradient": shares[worst]}


def _share(difference: float, norm: float) -> float:
    """Return the norm of a difference relative to the norm of the gradient.

    Return 0 if both norms are below 1e-9, as for the key biases, whose gradient is mathematically zero.
    """
    both_zero = difference <= _ZERO_GRADIENT_BOUND and norm <= _ZERO_GRADIENT_BOUND
    return 0.0 if both_zero else difference / max(norm, 1e-30)


def _compare_packed_with_unpacked(
    model: Model, packed: BatchArrays, loss: Loss = "token"
) -> tuple[_Differences, _Differences]:
    """Run the packs, and the same sequences with one sequence per row, and compare the results.

    Returns:
        The differences of outputs and losses, and the differences of gradients, both by name.
    """
    placed = split_packs(packed)
    length, slots = packed["input_ids"].shape[1], packed["masked_lm_ids"].shape[1]
    ours = model.compute_losses_and_gradients(packed, loss)
    single = model.compute_losses_and_gradients(join_sequences([[each.sequence] for each in placed], length, slots, 1), loss)
    outputs: _Differences = {name: (abs(ours.losses[name] - alone), abs(alone)) for name, alone in single.losses.items()}
    for row, each in enumerate(placed):
        alone = _PlacedSequence(each.sequence, row, 1, 0, np.arange(len(each.masked_slots)))
        pairs = zip(_outputs_of(ours.outputs, each), _outputs_of(single.outputs, alone), strict=True)
        for (name, mine), (_, theirs) in pairs:
            difference, largest = outputs.get(name, (0.0, 0.0))
            distance = float(np.abs(mine - theirs).max(initial=0.0))
            outputs[name] = (max(difference, distance), max(largest, float(np.abs(theirs).max(initial=0.0))))
    norms: _Differences = {}
    for name, gradient in single.gradients.items():
        both = (ours.gradients[name] - gradient, gradient)
        difference, norm = (float(np.linalg.norm(each.astype(np.float64).ravel())) for each in both)
        norms[name] = (difference, norm)
    return outputs, norms


def _check_leaks(model: Model, vocabulary_size: int, batch: BatchArrays, say: Callable[[str], None]) -> int:
    """Change every sequence once, and check that the outputs of all others stay identical.

    Returns:
        The number of unchanged sequences that were compared, added over all trials.

    Raises:
        FailedError: The output of an unchanged sequence changed, or the output of a changed one did not.
    """
    total = 0
    for chosen in range(int(batch["input_mask"].max())):
        compared, leaks, moved = _probe_leaks(model, vocabulary_size, batch, chosen)
        total += compared
        if leaks:
            raise FailedError(f"{leaks} sequences changed when a neighbour in their pack did: the mask leaks")
        if not moved:
            raise FailedError(
                "changing the tokens of a sequence did not change its own outputs: the weights ignore the input"
            )
    say(f"verify-model:   leak probe: {total} sequences next to a changed one, not one bit differs")
    return total


def _probe_leaks(model: Model, vocabulary_size: int, packed: BatchArrays, chosen: int = 0) -> tuple[int, int, bool]:
    """Change every token of one sequence in each pack, and compare the outputs before and after.

    Args:
        model: The model.
        vocabulary_size: The number of token ids.
        packed: The packs.
        chosen: The number of the sequence to change, from 0. It is taken modulo the number of sequences in the pack.

    Returns:
        The number of sequences that were not changed, the number of them whose outputs changed, and whether all outputs of
        all changed sequences changed.
    """
    placed = split_packs(packed)
    per_pack = np.bincount([each.pack for each in placed], minlength=len(packed["input_ids"]))
    is_chosen = [each.number - 1 == chosen % int(per_pack[each.pack]) for each in placed]
    changed_ids = packed["input_ids"].copy()
    for each, changes in zip(placed, is_chosen, strict=True):
        if changes:
            changed_ids[each.pack, each.positions] = (each.sequence.input_ids + 1) % vocabulary_size
    before, after = (
        model.compute_losses_and_gradients(batch, "token").outputs
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
    return len(placed) - sum(is_chosen), leaks, moved


def _outputs_of(outputs: dict[str, Float32Array], placed: _PlacedSequence) -> Iterator[tuple[str, Float32Array]]:
    """Yield the name and the values of each output of one sequence."""
    slots = {"hidden_states": placed.positions, "masked_lm_logits": placed.masked_slots}
    for name, values in outputs.items():
        of_pack = values[placed.pack]
        yield name, of_pack[slots[name]] if name in slots else of_pack[placed.number - 1]


# --- Splitting packs into sequences, and joining sequences to packs
#
# This code handles one sequence after the other. It is simple rather than fast, and meant for checks and small batches.


@dataclass(frozen=True)
class Sequence:
    """A single sequence.

    Attributes:
        input_ids: int32 [tokens].
        segment_ids: int32 [tokens].
        masked_positions: int32 [masked tokens], the positions of the masked tokens from the start of the sequence.
        masked_ids: int32 [masked tokens], the original ids of the masked tokens.
        next_sentence_label: 0 or 1.
    """

    input_ids: Int32Array
    segment_ids: Int32Array
    masked_positions: Int32Array
    masked_ids: Int32Array
    next_sentence_label: int

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.input_ids)


@dataclass(frozen=True)
class _PlacedSequence:
    """A sequence, and the position of its inputs and outputs in a batch of packs.

    Attributes:
        sequence: The sequence.
        pack: The index of its pack.
        number: The number of the sequence in its pack, from 1.
        start: The position of its first token in the pack.
        masked_slots: The masked slots of the pack that belong to the sequence.
    """

    sequence: Sequence
    pack: int
    number: int
    start: int
    masked_slots: Int32Array

    @property
    def positions(self) -> slice:
        """The positions of the tokens in the pack."""
        return slice(self.start, self.start + self.sequence.length)


def split_packs(batch: BatchArrays) -> list[_PlacedSequence]:
    """Return every sequence of a batch of packs, pack by pack."""
    return [
        _placed(batch, pack, number)
        for pack, mask_L in enumerate(batch["input_mask"])
        for number in range(1, int(mask_L.max(initial=0)) + 1)
    ]


def _placed(batch: BatchArrays, pack: int, number: int) -> _PlacedSequence:
    """Return sequence `number` (from 1) of a pack."""
    positions, slots = (np.flatnonzero(batch[name][pack] == number) for name in ("input_mask", "masked_lm_weights"))
    start = int(positions[0])
    sequence = Sequence(
        input_ids=batch["input_ids"][pack][positions].astype(np.int32),
        segment_ids=batch["segment_ids"][pack][positions].astype(np.int32),
        masked_positions=(batch["masked_lm_positions"][pack][slots] - start).astype(np.int32),
        masked_ids=batch["masked_lm_ids"][pack][slots].astype(np.int32),
        next_sentence_label=int(batch["next_sentence_labels"][pack][number - 1]),
    )
    return _PlacedSequence(sequence, pack, number, start, slots)


def join_sequences(
    packs: list[list[Sequence]], length: int, masked_slots: int, depth: int
) -> dict[str, Int32Array | Float32Array]:
    """Join lists of sequences to a batch of packs.

    Args:
        packs: The sequences of each pack. They must fit into the sizes that follow.
        length: The length of a pack, in tokens.
        masked_slots: The number of masked slots of a pack.
        depth: The maximum number of sequences in a pack.

    Returns:
        The packed features by name, int32 or float32 [packs, ...].
    """
    rows_BL = np.zeros((4, len(packs), length), np.int32)
    slots_BQ = np.zeros((2, len(packs), masked_slots), np.int32)
    numbers_BQ = np.zeros((len(packs), masked_slots), np.float32)
    sentences_BS = np.zeros((2, len(packs), depth), np.int32)
    real_BS = np.zeros((len(packs), depth), np.float32)
    for pack, sequences in enumerate(packs):
        start = slot = 0
        for number, sequence in enumerate(sequences, start=1):
            here, used = slice(start, start + sequence.length), slice(slot, slot + len(sequence.masked_ids))
            own_positions = np.arange(sequence.length)
            for row_L, values in zip(
                rows_BL[:, pack], (sequence.input_ids, number, sequence.segment_ids, own_positions), strict=True
            ):
                row_L[here] = values
            slots_BQ[0, pack, used] = sequence.masked_positions + start
            slots_BQ[1, pack, used] = sequence.masked_ids
            numbers_BQ[pack, used] = number
            sentences_BS[:, pack, number - 1] = start, sequence.next_sentence_label
            real_BS[pack, number - 1] = 1
            start, slot = here.stop, used.stop
    return {
        **dict(zip(("input_ids", "input_mask", "segment_ids", "positions"), rows_BL, strict=True)),
        **dict(zip(("masked_lm_positions", "masked_lm_ids"), slots_BQ, strict=True)),
        "masked_lm_weights": numbers_BQ,
        **dict(zip(("next_sentence_positions", "next_sentence_labels"), sentences_BS, strict=True)),
        "next_sentence_weights": real_BS,
    }
