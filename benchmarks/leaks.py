"""Test which inputs keep the sequences of a pack separate, for several models and attention implementations, and print the
table for the documentation.

    python benchmarks/leaks.py [MODEL...]

Small random models of `transformers` process packs of random tokens on a CPU, and also each sequence alone. Then the first
sequence of each pack is changed. If the outputs are right, a cell shows the largest difference between the outputs of packed
and single sequences. If sequences leak, the cell shows how much a changed neighbour changes an output. Flex attention runs
in plain PyTorch here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from gaudi_bert.encoders.pack_inputs import PackInputs, build_attention_mask
from gaudi_bert.encoders.pack_inputs_trial import determine_inputs_for_packs
from gaudi_bert.encoders.trial import (
    ALLOWED_DIFFERENCE,
    MODEL_ERRORS,
    Pack,
    build_trial_packs,
    compute_largest_neighbour_change,
    compute_max_abs_output_or_one,
    compute_outputs_without_packing,
    compute_token_outputs,
    largest_difference,
    make_computation_reproducible,
    split_by_sequence,
)
from gaudi_bert.pytorch.collate import TARGETS, PackCollator, model_inputs
from tests.builders.torch_models import CONFIGS, SIZES

NEIGHBOUR_BOUND = 1e-6  # the allowed effect of a changed neighbour, relative to the largest output or 1
ATTENTIONS = ("sdpa", "eager", "flex_attention")
LENGTH = 256
Batch = dict[str, Any]
Feed = Callable[[PackInputs, list[Pack]], Batch]
CASES = {"bert": partial(transformers.BertConfig, **SIZES, max_position_embeddings=LENGTH), **CONFIGS}


def target(name: str, changes: Callable[[PackInputs, Batch], Batch] = lambda _, __: {}) -> Feed:
    """Return a function that builds the batch of a target of `PackCollator`, with some inputs replaced."""

    def feed(pack_inputs: PackInputs, rows: list[Pack]) -> Batch:
        batch = PackCollator(name, pack_inputs)(rows)
        return {**batch, **changes(pack_inputs, batch)}

    return feed


def mask(make: Callable[[PackInputs, Any], Any]) -> Feed:
    """Return a function that builds the batch of the target transformers-5, with a mask that is computed from the sequence
    numbers.
    """
    return target("transformers-5", lambda pack_inputs, batch: {"attention_mask": make(pack_inputs, batch["sequence_ids"])})


WAYS = {
    **{name: target(name) for name in TARGETS if name != "optimum-habana"},
    "positions only": mask(lambda _, __: None),
    "2-D mask of sequence numbers": mask(lambda _, numbers: numbers),
    "4-D bool mask": mask(lambda pack_inputs, numbers: build_attention_mask(numbers, pack_inputs.is_causal).unsqueeze(1)),
    "additive mask, positions from 0": target(
        "transformers-5", lambda pack_inputs, batch: {"position_ids": batch["position_ids"] - pack_inputs.position_offset}
    ),
}
"""The tested inputs: the targets of `PackCollator`, and inputs that other software uses."""


def format_cell(model: Any, pack_inputs: PackInputs, way: str) -> str:
    """Return one cell of the table."""
    rows, changed = build_trial_packs(model.config, LENGTH, pack_inputs.longest_sequence)
    alone = compute_outputs_without_packing(model, pack_inputs, rows)
    try:
        batches = [model_inputs(WAYS[way](pack_inputs, each)) for each in (rows, changed)]
        before, after = (split_by_sequence(compute_token_outputs(model, batch), rows) for batch in batches)
    except MODEL_ERRORS:
        return "refused"
    difference, moved, scale = (
        largest_difference(before, alone),
        compute_largest_neighbour_change(before, after, rows),
        compute_max_abs_output_or_one(alone),
    )
    if moved > NEIGHBOUR_BOUND * scale:
        return f"**leaks, {moved:.1g}**"
    return f"right, {difference:.0e}" if difference <= ALLOWED_DIFFERENCE * scale else f"**wrong, {difference:.1g}**"


def main() -> None:
    """Print the table."""
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}, CPU, float32\n")
    print("| model, attention | " + " | ".join(WAYS) + " |")
    print("|---" * (len(WAYS) + 1) + "|", flush=True)
    for name in sys.argv[1:] or CASES:
        kind = transformers.AutoModelForCausalLM if name == "gpt2" else transformers.AutoModel
        for attention in ATTENTIONS:
            torch.manual_seed(7)
            model = kind.from_config(CASES[name]()).eval()
            try:
                model.set_attn_implementation(attention)
            except ValueError:  # transformers does not support this attention implementation for the model
                continue
            with make_computation_reproducible():
                pack_inputs = determine_inputs_for_packs(model)
                cells = [format_cell(model, pack_inputs, way) for way in WAYS]
            print(f"| {name}, {attention.split('_')[0]} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
