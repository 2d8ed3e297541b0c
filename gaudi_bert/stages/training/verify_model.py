"""Stage verify-model: packing changes nothing, shown for a user's own weights and data.

The first packs of the data go through the model packed and one sequence to a row; outputs, losses and the
gradient of every variable must agree to float32 rounding. Then all tokens of one sequence of each pack are
changed, and no bit of any other sequence's outputs may change. Without a checkpoint, the weights are seeded
random ones; without data, so are the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gaudi_bert.artefacts.store.mirror import mirror
from gaudi_bert.common.arrays import Float32Array, Int32Array
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.training.model_results import VerifyModelResult
from gaudi_bert.stages.training.stored_inputs import open_data, weights_here

if TYPE_CHECKING:
    from gaudi_bert.model.bert import BertForPretraining
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.model.equivalence import Differences
    from gaudi_bert.training.input.source import DataSource

__all__ = ["verify_model"]

OUTPUT_BOUND = 1e-5
GRADIENT_BOUND = 1e-5
ZERO_GRADIENT_BOUND = 1e-9
PACKS = 8
RANDOM_LENGTH, RANDOM_VOCABULARY = 128, 997

Batch = dict[str, Int32Array | Float32Array]
Values = dict[str, Float32Array] | None
Loss = Literal["token", "sequence"]
LOSSES: tuple[Loss, ...] = ("token", "sequence")
Dtype = Literal["float32", "float64"]


def verify_model(
    *, checkpoint: Path | None, data: Path | None, reporter: Reporter, packs: int = PACKS, seed: int = 12345
) -> VerifyModelResult:
    """Prove that packed equals unpacked.

    Args:
        checkpoint: a checkpoint, or a folder that `train` made; None for random weights.
        data: a packed folder, or unpacked records, which are joined to packs first; None for random sequences.
        reporter: where the differences are said.
        packs: how many of the data's first packs are used.
        seed: of random weights and sequences.

    Raises:
        InputError: the checkpoint or the data cannot be read, or do not belong together.
        FailedError: a difference is beyond rounding, or an output leaked into another sequence.
    """
    from gaudi_bert.stages.training.proof_packs import first_packs, random_packs
    from gaudi_bert.training.input.source import check_fits

    with mirror(None, (checkpoint, data)) as copies:
        source = open_data(data, copies) if data is not None else None
        if checkpoint is None:
            config, values = _random_config(source), None
        else:
            config, values = _read_weights(weights_here(checkpoint, copies))
        if source is not None:
            check_fits(source, config)
            batch = first_packs(source, config, packs)
        else:
            batch = random_packs(config, seed)
    model = _build(config, values, seed, "float32")
    found, per_sequence = (_compare(model, batch, values, seed, reporter, loss) for loss in LOSSES)
    return VerifyModelResult(
        weights="random" if checkpoint is None else str(checkpoint),
        data="random" if data is None else str(data),
        packs=found.packs,
        sequences=found.sequences,
        **found.differences,
        gradient=found.gradient,
        gradient_of=found.gradient_of,
        per_sequence_loss_difference=per_sequence.differences["masked_lm_loss"],
        leaks=0,
        leak_comparisons=_probe(model, batch, reporter),
    )


@dataclass(frozen=True)
class _Comparison:
    """The largest difference of each output and loss, by name, and of the gradients, with the variable's name."""

    packs: int
    sequences: int
    differences: dict[str, float]
    gradient: float
    gradient_of: str


def _compare(
    model: BertForPretraining, batch: Batch, values: Values, seed: int, reporter: Reporter, loss: Loss
) -> _Comparison:
    """Outputs, losses and gradients; the gradients that float32 cannot tell apart are settled in float64."""
    from gaudi_bert.model.equivalence import compare_packed_with_unpacked

    found = compare_packed_with_unpacked(model, batch, loss)
    reporter.say(f"verify-model: {found.sequences} sequences in {found.packs} packs, masked-LM loss per {loss}")
    differences = {}
    for name, (difference, largest) in {**found.outputs, **found.losses}.items():
        bound = OUTPUT_BOUND * max(1.0, largest)
        reporter.say(f"verify-model:   {name}: differs by {difference:.1e} at most (allowed {bound:.1e})")
        if not difference <= bound:
            raise FailedError(f"{name}: packed and unpacked differ by {difference:.1e}, allowed is {bound:.1e}")
        differences[name] = difference
    ratios = _gradient_ratios(found)
    unclear = [name for name, ratio in ratios.items() if not ratio <= GRADIENT_BOUND]
    if unclear:
        wide_model = _build(model.config, values, seed, "float64")
        exact = _gradient_ratios(compare_packed_with_unpacked(wide_model, batch, loss))
        for name in unclear:
            reporter.say(
                f"verify-model:   gradient of {name}: {ratios[name]:.1e} in float32, where it nearly cancels; "
                f"{exact[name]:.1e} in float64"
            )
            ratios[name] = exact[name]
    worst = max(ratios, key=lambda name: ratios[name])
    reporter.say(
        f"verify-model:   gradients of {len(ratios)} variables: differ by {ratios[worst]:.1e} of their norm at most "
        f"(allowed {GRADIENT_BOUND:.0e}), {worst}"
    )
    if not ratios[worst] <= GRADIENT_BOUND:
        raise FailedError(
            f"gradient of {worst}: packed and unpacked differ by {ratios[worst]:.1e} of its norm, "
            f"allowed is {GRADIENT_BOUND:.0e}"
        )
    return _Comparison(found.packs, found.sequences, differences, ratios[worst], worst)


def _gradient_ratios(found: Differences) -> dict[str, float]:
    """|difference| / |gradient| of each variable; 0 where both are 0 to within 1e-9 (the key biases)."""
    return {
        name: 0.0 if difference <= ZERO_GRADIENT_BOUND and size <= ZERO_GRADIENT_BOUND else difference / max(size, 1e-30)
        for name, (difference, size) in found.gradients.items()
    }


def _probe(model: BertForPretraining, batch: Batch, reporter: Reporter) -> int:
    """Change every sequence once; how many others were compared."""
    from gaudi_bert.model.equivalence import probe_leaks

    compared = 0
    for chosen in range(int(batch["input_mask"].max())):
        report = probe_leaks(model, batch, chosen)
        compared += report.sequences_compared
        if report.leaks:
            raise FailedError(f"{report.leaks} sequences changed when a neighbour in their pack did: the mask leaks")
        if not report.own_outputs_moved:
            raise FailedError(
                "changing the tokens of a sequence did not change its own outputs: the weights ignore the input"
            )
    if compared:
        reporter.say(f"verify-model:   leak probe: {compared} sequences beside a changed one, none differs by a bit")
    else:
        reporter.say("verify-model:   leak probe: nothing to compare, no pack that was looked at holds two sequences")
    return compared


def _read_weights(checkpoint: Path) -> tuple[BertConfig, dict[str, Float32Array]]:
    from gaudi_bert.model.config import BertConfig
    from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint

    file = find_checkpoint(checkpoint)
    stored = read_checkpoint(file)
    if "model" not in stored.settings:
        raise InputError(f"{file}: holds no model settings; use a checkpoint that `train` wrote")
    return BertConfig.from_json(stored.settings["model"]), dict(stored.variables)


def _random_config(source: DataSource | None) -> BertConfig:
    """A small BERT, with room for the data."""
    from gaudi_bert.model.config import BertConfig

    length = source.schema.max_sequence_length if source is not None else RANDOM_LENGTH
    vocabulary = source.vocabulary_size if source is not None else RANDOM_VOCABULARY
    return BertConfig(
        vocab_size=vocabulary if vocabulary is not None else BertConfig.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=length,
        initializer_range=0.1,
    )


def _build(config: BertConfig, values: Values, seed: int, compute_dtype: Dtype) -> BertForPretraining:
    from gaudi_bert.model.bert import BertForPretraining

    model = BertForPretraining(config, seed=seed, compute_dtype=compute_dtype)
    model.load_values(values or {})
    return model
