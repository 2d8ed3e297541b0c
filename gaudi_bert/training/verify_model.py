"""Stage verify-model: check with a user's own weights that packing does not change what a model computes.

Random sequences pass through the model twice: packed, and with one sequence per row. Outputs, losses and the gradient of
every variable must agree up to float32 rounding. Then all tokens of one sequence in each pack are changed, and the outputs
of all other sequences must stay bit-identical. If no checkpoint is given, the weights are random numbers from a fixed seed.

A `transformers` folder with any kind of model is tried in the same way as by `finetune` (`encoders/packed_model.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from gaudi_bert.common.arrays import AnyArray, BatchArrays, Float32Array, Int32Array, WeightArrays
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import check_model_exists
from gaudi_bert.common.progress import Reporter, format_count
from gaudi_bert.config.values import Engine as EngineChoice
from gaudi_bert.engines import choose_engine, load_engine
from gaudi_bert.engines.protocol import Model, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.heads import Loss, PretrainingHead
from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint
from gaudi_bert.training.weights import open_local_weights

_OUTPUT_BOUND = 1e-5
_GRADIENT_BOUND = 1e-5
_ZERO_GRADIENT_BOUND = 1e-9
_LENGTH, _VOCABULARY, _PACKS, _DEPTH = 128, 997, 5, 8
_SEED = 12345
_Dtype = Literal["float32", "float64"]


class _Difference(NamedTuple):
    """How much packing changes an output, a loss or a gradient, and how large the unpacked value is.

    Attributes:
        difference: The largest absolute difference of an output, or the norm of the difference of a gradient.
        size: The largest absolute value of the output, or the norm of the gradient.
    """

    difference: float
    size: float


class _Differences(NamedTuple):
    """The differences between packed and unpacked outputs, losses and gradients, by name."""

    outputs: dict[str, _Difference]
    gradients: dict[str, _Difference]


class _AttentionLeaks(NamedTuple):
    """The result of a leak check, which changes the tokens of some sequences and compares the outputs of all others.

    Attributes:
        unchanged_sequences: The number of sequences whose own tokens were not changed.
        leaks: The number of these sequences whose outputs changed.
        all_outputs_moved: Whether all outputs of all changed sequences changed.
    """

    unchanged_sequences: int
    leaks: int
    all_outputs_moved: bool


@dataclass(frozen=True)
class VerifyModelResult:
    """The result of `verify_model`, such as the number of sequences and the largest differences due to packing.

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
        """Format the result as lines for the user."""
        packed = f"{format_count(self.sequences, 'sequence')} in {format_count(self.packs, 'pack')}"
        largest = max(difference for name, difference in self.differences.items() if name != "gradient")
        neighbours = f"{format_count(self.leak_comparisons, 'sequence')} next to a changed sequence kept identical outputs"
        return [
            f"packing changes nothing: {packed} have the same outputs as with one sequence per row, up to {largest:.1e}, "
            f"and the same gradients, up to {self.differences['gradient']:.1e}; {neighbours}"
        ]


def verify_model(*, checkpoint: Path | None, reporter: Reporter, engine: EngineChoice = "auto") -> VerifyModelResult:
    """Check that a model computes the same outputs, losses and gradients for packed and unpacked sequences.

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
    with nullcontext() if checkpoint is None else open_local_weights(checkpoint) as weights:
        if weights is not None:
            check_model_exists(weights)
            if (weights / "config.json").is_file():  # a transformers folder with any kind of model
                # This module loads torch and transformers, so import it only if it is needed.
                from gaudi_bert.encoders.packed_model import verify_model_folder

                differences, count, sequences = verify_model_folder(weights, reporter.say)
                return VerifyModelResult(str(weights), count, sequences, differences, sequences - count)
            stored = read_checkpoint(find_checkpoint(weights))
            if "model" not in stored.settings:
                raise InputError(
                    f"{weights}: the checkpoint contains no model settings; pass a checkpoint that `train` wrote"
                )
            config, values = BertConfig.from_json(stored.settings["model"]), stored.variables
    chosen = choose_engine(engine, setting_name="--engine")
    reporter.say(f"verify-model: {chosen.format_choice()}")
    engine_module, spec, batch = load_engine(chosen.name), ModelSpec(config, PretrainingHead()), _make_random_packs(config)

    def build_model(compute_dtype: _Dtype) -> Model:
        """Build a model that computes in the given dtype, and load the weights into it."""
        model = engine_module.build_model(spec, seed=_SEED, compute_dtype=compute_dtype)
        model.load_variables(values)
        return model

    return VerifyModelResult(
        weights="random" if checkpoint is None else str(checkpoint),
        packs=len(batch["input_ids"]),
        sequences=len(split_packs(batch)),
        differences={
            **_check_packed_equals_unpacked(build_model, batch, "sequence", reporter.say),
            **_check_packed_equals_unpacked(build_model, batch, "token", reporter.say),
        },
        leak_comparisons=_verify_no_attention_leaks(build_model("float32"), config.vocab_size, batch, reporter.say),
    )


def _make_random_packs(config: BertConfig) -> BatchArrays:
    """Return packs of random sequences of various lengths. Some packs contain padding.

    The sequences are packed by first-fit decreasing.
    """
    random, length = np.random.default_rng(_SEED), min(_LENGTH, config.max_position_embeddings)
    packs: list[list[Sequence]] = []
    for number, size in enumerate(sorted(random.integers(1, max(2, length // 2 + 1), 4 * _PACKS).tolist(), reverse=True)):
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
    return collate_packs(packs, length, slots, max(map(len, packs)))


# --- Comparing packed with unpacked, for any weights and any packs (Krell et al., 2021, section 3.2: "the behavior of the
# model is the same")
#
# The compared outputs are those of training, where the last layer is computed only at the positions that the heads read.
# In addition, the hidden states of all tokens are compared.


def _check_packed_equals_unpacked(
    build_model: Callable[[_Dtype], Model], batch: BatchArrays, loss: Loss, print_line: Callable[[str], None]
) -> dict[str, float]:
    """Check that a model computes the same outputs, losses and gradients for packs and for single sequences.

    Gradients that nearly cancel differ too much in float32, so they are computed again in float64.

    Args:
        build_model: Builds the model with a compute dtype.
        batch: The packs.
        loss: Whether the masked-LM loss is a mean over tokens or over sequences.
        print_line: Prints a line for the user.

    Returns:
        The largest differences, as in `VerifyModelResult`.

    Raises:
        FailedError: A difference is larger than allowed.
    """
    outputs, gradients = _measure_differences(build_model("float32"), batch, loss)
    print_line(f"verify-model: {format_count(len(batch['input_ids']), 'pack')}, masked-LM loss per {loss}")
    for name, (difference, size) in outputs.items():
        bound = _OUTPUT_BOUND * max(1.0, size)
        print_line(f"verify-model:   {name}: differs by at most {difference:.1e} (allowed: {bound:.1e})")
        if not difference <= bound:
            raise FailedError(
                f"{name}: the packed and unpacked values differ by {difference:.1e}, but at most {bound:.1e} is allowed"
            )
    relative = {name: _compute_relative_difference(*norms) for name, norms in gradients.items()}
    unclear = [name for name, difference in relative.items() if not difference <= _GRADIENT_BOUND]
    if unclear:
        exact = _measure_differences(build_model("float64"), batch, loss).gradients
        relative |= {name: _compute_relative_difference(*exact[name]) for name in unclear}
        print_line(
            f"verify-model:   these gradients nearly cancel in float32 and were compared in float64: {', '.join(unclear)}"
        )
    worst = max(relative, key=lambda name: relative[name])
    comparison = f"gradient of {worst}: the packed and unpacked gradients differ by {relative[worst]:.1e} of the norm"
    print_line(
        f"verify-model:   {comparison} (allowed: {_GRADIENT_BOUND:.0e}), the largest difference of {len(relative)} variables"
    )
    if not relative[worst] <= _GRADIENT_BOUND:
        raise FailedError(f"{comparison}, but at most {_GRADIENT_BOUND:.0e} is allowed")
    return {**{name: difference for name, (difference, _) in outputs.items()}, "gradient": relative[worst]}


def _compute_relative_difference(difference: float, norm: float) -> float:
    """Divide the norm of the difference between the packed and the unpacked gradient by the norm of the unpacked gradient.

    Return 0 if both norms are below 1e-9, as for the key biases, whose gradient is mathematically zero.
    """
    both_zero = difference <= _ZERO_GRADIENT_BOUND and norm <= _ZERO_GRADIENT_BOUND
    return 0.0 if both_zero else difference / max(norm, 1e-30)


def _measure_differences(model: Model, packed: BatchArrays, loss: Loss = "token") -> _Differences:
    """Run a model on packs and on the same sequences in separate rows, and return how much the results differ."""
    placed_sequences = split_packs(packed)
    length, slots = packed["input_ids"].shape[1], packed["masked_lm_ids"].shape[1]
    single_rows = collate_packs([[placed.sequence] for placed in placed_sequences], length, slots, 1)
    of_packs, of_rows = (model.compute_losses_and_gradients(each, loss) for each in (packed, single_rows))
    outputs = {name: _Difference(abs(of_packs.losses[name] - value), abs(value)) for name, value in of_rows.losses.items()}
    for row, placed in enumerate(placed_sequences):
        in_own_row = _PlacedSequence(placed.sequence, row, 1, 0, np.arange(len(placed.masked_slots)))
        packed_outputs = _select_outputs(of_packs.outputs, placed)
        for name, row_output in _select_outputs(of_rows.outputs, in_own_row).items():
            distance = float(np.abs(packed_outputs[name] - row_output).max(initial=0.0))
            size = float(np.abs(row_output).max(initial=0.0))
            before = outputs.get(name, _Difference(0.0, 0.0))
            outputs[name] = _Difference(max(before.difference, distance), max(before.size, size))
    gradients = {
        name: _Difference(_compute_norm(of_packs.gradients[name] - gradient), _compute_norm(gradient))
        for name, gradient in of_rows.gradients.items()
    }
    return _Differences(outputs, gradients)


def _compute_norm(values: AnyArray) -> float:
    """Compute the Euclidean norm of an array in float64."""
    return float(np.linalg.norm(values.astype(np.float64).ravel()))


def _verify_no_attention_leaks(
    model: Model, vocabulary_size: int, packed: BatchArrays, print_line: Callable[[str], None]
) -> int:
    """In each pack, change one sequence at a time, and check that the outputs of all other sequences stay bit-identical.

    Returns:
        The number of unchanged sequences that were compared, added over all trials.

    Raises:
        FailedError: The output of an unchanged sequence changed, or the output of a changed one did not.
    """
    total = 0
    for sequence_index in range(int(packed["input_mask"].max())):
        counts = _measure_attention_leaks(model, vocabulary_size, packed, sequence_index)
        total += counts.unchanged_sequences
        if counts.leaks:
            raise FailedError(
                f"the attention mask leaks: the outputs of {counts.leaks} sequences changed when only another sequence of "
                "their pack was changed"
            )
        if not counts.all_outputs_moved:
            raise FailedError(
                "the weights ignore the input: the outputs of a sequence stayed the same when its own tokens were changed"
            )
    print_line(f"verify-model:   leaks: the outputs of {total} sequences next to a changed sequence stayed bit-identical")
    return total


def _measure_attention_leaks(
    model: Model, vocabulary_size: int, packed: BatchArrays, sequence_index: int = 0
) -> _AttentionLeaks:
    """Change all tokens of one sequence in each pack, and count the other sequences whose outputs change.

    Args:
        model: The model.
        vocabulary_size: The number of token ids.
        packed: The packs.
        sequence_index: The index of the sequence to change in each pack, from 0. It is taken modulo the number of sequences
            in the pack.
    """
    placed_sequences = split_packs(packed)
    sequences_in_pack = np.bincount([placed.pack for placed in placed_sequences], minlength=len(packed["input_ids"]))
    changed_ids = packed["input_ids"].copy()
    changed, unchanged = [], []
    for placed in placed_sequences:
        if placed.number - 1 == sequence_index % int(sequences_in_pack[placed.pack]):
            changed_ids[placed.pack, placed.positions] = (placed.sequence.input_ids + 1) % vocabulary_size
            changed.append(placed)
        else:
            unchanged.append(placed)
    before, after = (
        model.compute_losses_and_gradients(batch, "token").outputs
        for batch in (packed, {**packed, "input_ids": changed_ids})
    )

    def compare_outputs_bitwise(placed: _PlacedSequence) -> list[bool]:
        """Return whether each non-empty output of a sequence has the same bits before and after other sequences change."""
        now = _select_outputs(after, placed)
        return [old.tobytes() == now[name].tobytes() for name, old in _select_outputs(before, placed).items() if old.size]

    leaks = sum(not all(compare_outputs_bitwise(placed)) for placed in unchanged)
    return _AttentionLeaks(len(unchanged), leaks, not any(any(compare_outputs_bitwise(placed)) for placed in changed))


def _select_outputs(outputs: dict[str, Float32Array], placed: _PlacedSequence) -> dict[str, Float32Array]:
    """Return the outputs of one sequence in a batch, by name."""
    slots = {"hidden_states": placed.positions, "masked_lm_logits": placed.masked_slots}
    of_pack = {name: values[placed.pack] for name, values in outputs.items()}
    return {name: values[slots[name]] if name in slots else values[placed.number - 1] for name, values in of_pack.items()}


# --- Splitting packs into sequences, and collating sequences to packs
#
# This code handles one sequence after the other. It is simple rather than fast, and meant for checks and small batches.


@dataclass(frozen=True)
class Sequence:
    """A pretraining sequence outside of a pack, with its tokens, masked tokens and next-sentence label.

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
    """A sequence and its position in a batch of packs.

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
    """Extract all sequences from a batch of packs, with their positions in the batch."""
    return [
        _extract_sequence(batch, pack, number)
        for pack, mask_L in enumerate(batch["input_mask"])
        for number in range(1, int(mask_L.max(initial=0)) + 1)
    ]


def _extract_sequence(batch: BatchArrays, pack: int, number: int) -> _PlacedSequence:
    """Extract sequence `number`, counted from 1, from a pack. Return it with its position in the batch."""
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


def collate_packs(
    sequences_by_pack: list[list[Sequence]], length: int, masked_slots: int, depth: int
) -> dict[str, Int32Array | Float32Array]:
    """Collate lists of sequences, one list per pack, to a batch of packs.

    Args:
        sequences_by_pack: The sequences of each pack. They must fit into the sizes that follow.
        length: The length of a pack, in tokens.
        masked_slots: The number of masked slots of a pack.
        depth: The maximum number of sequences in a pack.

    Returns:
        The packed features by name, int32 or float32 [packs, ...].
    """
    packs = len(sequences_by_pack)
    rows_BL = np.zeros((4, packs, length), np.int32)
    slots_BQ = np.zeros((2, packs, masked_slots), np.int32)
    numbers_BQ = np.zeros((packs, masked_slots), np.float32)
    sentences_BS = np.zeros((2, packs, depth), np.int32)
    real_BS = np.zeros((packs, depth), np.float32)
    for pack, sequences in enumerate(sequences_by_pack):
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
