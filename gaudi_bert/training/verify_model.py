"""Stage verify-model: packing changes nothing, shown for a user's own weights and data.

The first packs of the data go through the model packed and one sequence to a row; outputs, losses and the
gradient of every variable must agree to float32 rounding. Then all tokens of one sequence of each pack are
changed, and not one bit of any other sequence's outputs may change. Without a checkpoint, the weights are seeded
random ones; without data, so are the sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from gaudi_bert.common.arrays import BatchArrays, Float32Array, Int32Array, IntArray, random_words
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter, count_of
from gaudi_bert.config.values import Engine as EngineChoice
from gaudi_bert.engines.choose import choose_engine, load_engine
from gaudi_bert.engines.protocol import Engine, Model, ModelSpec
from gaudi_bert.model.config import BertConfig
from gaudi_bert.model.features import PACKED_FEATURES, PlacedSequence, Sequence, as_packed, join_sequences, split_packs
from gaudi_bert.model.heads import Loss, PretrainingHead
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.schema import RecordError, check_features
from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint
from gaudi_bert.training.input.batches import check_values, value_limits
from gaudi_bert.training.input.source import DataSource, check_fits, open_data
from gaudi_bert.training.weights import local_weights

OUTPUT_BOUND = 1e-5
GRADIENT_BOUND = 1e-5
_ZERO_GRADIENT_BOUND = 1e-9
_PACKS = 8
_RANDOM_LENGTH, _RANDOM_VOCABULARY, _RANDOM_PACKS = 128, 997, 5
_MOST_JOINED = 8
# Packs looked at for some that hold several sequences.
_SEARCHED = 256

Batch = dict[str, Int32Array | Float32Array]
Values = dict[str, Float32Array] | None
_LOSSES: tuple[Loss, ...] = ("token", "sequence")
_Dtype = Literal["float32", "float64"]
# The name of a record in errors, and its features.
_NamedRecord = tuple[str, dict[str, IntArray | Float32Array]]
_KINDS = {"int64": "int32", "float32": "float32"}


@dataclass(frozen=True)
class VerifyModelResult:
    """How far packed is from unpacked.

    Outputs and losses have their largest difference; `gradient` is the largest difference of a variable's gradient, as a
    share of its norm, and `gradient_of` that variable. `leaks` counts the sequences that changed when a neighbour in their
    pack did, of `leak_comparisons`.
    """

    weights: str
    data: str
    packs: int
    sequences: int
    hidden_states: float
    pooled_output: float
    masked_lm_logits: float
    next_sentence_logits: float
    masked_lm_loss: float
    next_sentence_loss: float
    gradient: float
    gradient_of: str
    per_sequence_loss_difference: float
    leaks: int
    leak_comparisons: int


def verify_model(
    *,
    checkpoint: Path | None,
    data: Path | None,
    reporter: Reporter,
    packs: int = _PACKS,
    seed: int = 12345,
    engine: EngineChoice = "auto",
) -> VerifyModelResult:
    """Prove that packed equals unpacked.

    Without a checkpoint, weights are random; without data, so are the sequences. Unpacked records are joined to packs first.
    """
    with open_data(data) if data is not None else nullcontext() as source:
        if checkpoint is None:
            config, values = _random_config(source), None
        else:
            with local_weights(checkpoint) as weights:
                config, values = _read_weights(weights)
        if source is not None:
            check_fits(source, config)
            batch = _first_packs(source, config, packs)
        else:
            batch = _random_packs(config, seed)
    chosen = choose_engine(engine, key="--engine")
    reporter.say(f"verify-model: {chosen.line()}")
    model_of = partial(_model, load_engine(chosen.name), config, values, seed)
    per_token, per_sequence = (_compare(model_of, batch, loss, reporter.say) for loss in _LOSSES)
    gradient_of = per_token.worst_gradient()
    return VerifyModelResult(
        weights="random" if checkpoint is None else str(checkpoint),
        data="random" if data is None else str(data),
        packs=per_token.packs,
        sequences=per_token.sequences,
        **{name: difference for name, (difference, _) in {**per_token.outputs, **per_token.losses}.items()},
        gradient=per_token.gradient_ratio(gradient_of),
        gradient_of=gradient_of,
        per_sequence_loss_difference=per_sequence.losses["masked_lm_loss"][0],
        leaks=0,
        leak_comparisons=_probe(model_of("float32"), config.vocab_size, batch, reporter.say),
    )


def _model(engine: Engine, config: BertConfig, values: Values, seed: int, compute_dtype: _Dtype) -> Model:
    """What is proven: a model with these weights, random ones where they are None, in float32 or float64."""
    model = engine.build(ModelSpec(config, PretrainingHead()), seed=seed, compute_dtype=compute_dtype)
    model.load_values(values or {})
    return model


def _compare(model_of: Callable[[_Dtype], Model], batch: Batch, loss: Loss, say: Callable[[str], None]) -> _Differences:
    """Outputs, losses and gradients; the gradients that float32 cannot tell apart are settled in float64."""
    compared = compare_packed_with_unpacked(model_of("float32"), batch, loss)
    packed = f"{count_of(compared.sequences, 'sequence')} in {count_of(compared.packs, 'pack')}"
    say(f"verify-model: {packed}, masked-LM loss per {loss}")
    for name, (difference, largest) in {**compared.outputs, **compared.losses}.items():
        bound = OUTPUT_BOUND * max(1.0, largest)
        say(f"verify-model:   {name}: differs by {difference:.1e} at most (allowed {bound:.1e})")
        if not difference <= bound:
            raise FailedError(f"{name}: packed and unpacked differ by {difference:.1e}, allowed is {bound:.1e}")
    unclear = [name for name in compared.gradients if not compared.gradient_ratio(name) <= GRADIENT_BOUND]
    if unclear:
        exact = compare_packed_with_unpacked(model_of("float64"), batch, loss)
        for name in unclear:
            say(
                f"verify-model:   gradient of {name}: {compared.gradient_ratio(name):.1e} in float32, where it nearly "
                f"cancels; {exact.gradient_ratio(name):.1e} in float64"
            )
            compared.gradients[name] = exact.gradients[name]
    worst = compared.worst_gradient()
    ratio = compared.gradient_ratio(worst)
    say(
        f"verify-model:   gradients of {len(compared.gradients)} variables: differ by {ratio:.1e} of their norm at most "
        f"(allowed {GRADIENT_BOUND:.0e}), {worst}"
    )
    if not ratio <= GRADIENT_BOUND:
        raise FailedError(
            f"gradient of {worst}: packed and unpacked differ by {ratio:.1e} of its norm, allowed is {GRADIENT_BOUND:.0e}"
        )
    return compared


def _probe(model: Model, vocabulary_size: int, batch: Batch, say: Callable[[str], None]) -> int:
    """Change every sequence once; how many others were compared."""
    compared = 0
    for chosen in range(int(batch["input_mask"].max())):
        report = probe_leaks(model, vocabulary_size, batch, chosen)
        compared += report.sequences_compared
        if report.leaks:
            raise FailedError(f"{report.leaks} sequences changed when a neighbour in their pack did: the mask leaks")
        if not report.own_outputs_moved:
            raise FailedError(
                "changing the tokens of a sequence did not change its own outputs: the weights ignore the input"
            )
    if compared:
        say(f"verify-model:   leak probe: {compared} sequences next to a changed one, not one bit differs")
    else:
        say("verify-model:   leak probe: nothing to compare, no pack that was looked at holds two sequences")
    return compared


def _read_weights(checkpoint: Path) -> tuple[BertConfig, dict[str, Float32Array]]:
    file = find_checkpoint(checkpoint)
    stored = read_checkpoint(file)
    if "model" not in stored.settings:
        raise InputError(f"{file}: holds no model settings; use a checkpoint that `train` wrote")
    return BertConfig.from_json(stored.settings["model"]), dict(stored.variables)


def _random_config(source: DataSource | None) -> BertConfig:
    """A small BERT, with room for the data."""
    length = source.schema.max_sequence_length if source is not None else _RANDOM_LENGTH
    vocabulary = source.vocabulary_size if source is not None else _RANDOM_VOCABULARY
    return BertConfig(
        vocab_size=vocabulary if vocabulary is not None else BertConfig.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=length,
        initializer_range=0.1,
    )


# --- The packs: the first ones of the data, or random ones


def _first_packs(source: DataSource, config: BertConfig, packs: int) -> Batch:
    """The first packs of several sequences in the data, checked; unpacked sequences are joined to packs first.

    Where there are too few of them among the first `_SEARCHED`, packs of one sequence make up the number.
    """
    if source.is_packed:
        records = sorted(_first_records(source, _SEARCHED), key=_holds_one)[:packs]
    else:
        records = _first_records(source, 3 * packs)
    names, rows = zip(*records, strict=True)
    arrays = as_packed(
        {spec.name: np.stack([row[spec.name] for row in rows]).astype(_KINDS[spec.kind]) for spec in source.schema.features}
    )
    batch = {name: arrays[name] for name in PACKED_FEATURES}
    check_values(batch, value_limits(source, config), lambda row: names[row])
    if source.is_packed:
        return batch
    return _join([placed.sequence for placed in split_packs(batch)], source.schema.max_sequence_length)


def _holds_one(record: _NamedRecord) -> bool:
    return np.count_nonzero(record[1]["next_sentence_weights"]) < 2


def _first_records(source: DataSource, count: int) -> list[_NamedRecord]:
    stream = (
        (path, n, record) for file, path in enumerate(source.files) for n, record in enumerate(source.records_of(file))
    )
    records: list[_NamedRecord] = []
    for path, number, record in itertools.islice(stream, count):
        name = f"{path}: record {number}"
        try:
            features = decode_example(record)
            check_features(features, source.schema)
        except RecordError as error:
            raise InputError(f"{name}: {error}; write the records again") from error
        records.append((name, features))
    if not records:
        raise InputError(f"{source.path}: holds no records; give a folder that holds some")
    return records


def _random_packs(config: BertConfig, seed: int) -> Batch:
    """Packs of random sequences of many lengths, some with padding."""
    length = min(_RANDOM_LENGTH, config.max_position_embeddings)
    words = iter(random_words(100_000, seed, "verify-model").tolist())

    def below(limit: int) -> int:
        return int(next(words)) % limit

    sequences: list[Sequence] = []
    while sum(sequence.length for sequence in sequences) < _RANDOM_PACKS * length:
        size = 1 + below(max(1, length // 2))
        positions = sorted({below(size) for _ in range(1 + size // 7)})
        sequences.append(
            Sequence(
                input_ids=np.array([below(config.vocab_size) for _ in range(size)], np.int32),
                segment_ids=np.array([slot * config.type_vocab_size // size for slot in range(size)], np.int32),
                masked_positions=np.array(positions, np.int32),
                masked_ids=np.array([below(config.vocab_size) for _ in positions], np.int32),
                next_sentence_label=int(len(sequences) % 3 < 2),
            )
        )
    return _join(sequences, length)


def _join(sequences: list[Sequence], length: int) -> Batch:
    """Packs by first fit, longest sequence first."""
    packs: list[list[Sequence]] = []
    for sequence in sorted(sequences, key=lambda each: -each.length):
        for pack in packs:
            if len(pack) < _MOST_JOINED and sum(each.length for each in pack) + sequence.length <= length:
                pack.append(sequence)
                break
        else:
            packs.append([sequence])
    slots = max(sum(len(sequence.masked_ids) for sequence in pack) for pack in packs)
    return join_sequences(packs, length, slots, max(len(pack) for pack in packs))


# --- Packed compared with unpacked, for any weights and any packs (Krell et al., 2021, section 3.2: "the behavior of the
# model is the same"). Outputs are those of training, where the last layer is computed for the positions that the heads read,
# and in addition the hidden states of all tokens.


@dataclass(frozen=True)
class _Differences:
    """How far packed is from unpacked; each output's largest absolute difference, and its largest absolute value.

    `gradients` holds, for each variable, the norm of the difference and the norm of the gradient.
    """

    outputs: dict[str, tuple[float, float]]
    losses: dict[str, tuple[float, float]]
    gradients: dict[str, tuple[float, float]]
    sequences: int
    packs: int

    def gradient_ratio(self, name: str) -> float:
        """|difference| / |gradient| of a variable; 0 where both are 0 to within 1e-9 (the key biases)."""
        difference, size = self.gradients[name]
        both_zero = difference <= _ZERO_GRADIENT_BOUND and size <= _ZERO_GRADIENT_BOUND
        return 0.0 if both_zero else difference / max(size, 1e-30)

    def worst_gradient(self) -> str:
        """The variable whose gradient differs most."""
        return max(self.gradients, key=self.gradient_ratio)


@dataclass(frozen=True)
class _LeakReport:
    """Of the leak probe: outputs of unchanged sequences that were compared, and how many of them changed by a bit."""

    sequences_compared: int
    leaks: int
    own_outputs_moved: bool


def compare_packed_with_unpacked(model: Model, packed: BatchArrays, loss: Loss = "token") -> _Differences:
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
    return _Differences(
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
