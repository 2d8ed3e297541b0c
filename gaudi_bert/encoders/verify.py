"""`verify-model` for any model of `transformers`: what `finetune` tries before it trains, with the model's own weights.

Packs of random tokens go through the model, and each of their sequences alone: outputs, the gradients of all weights, and
the answers of its head must agree. The same is tried in rows of 512 to 1,024 tokens, and in training mode a changed sequence
may not move its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.encoders.encoder_weights import architecture_of, read_model
from gaudi_bert.encoders.feeding import Feeding, fed_module
from gaudi_bert.encoders.feeding_trial import feeding_of, packed_batch
from gaudi_bert.encoders.packed_model import PackedModel, head_of
from gaudi_bert.encoders.trial import Row, alone_outputs, outputs_of, random_packs, sequences_of, tokens_of_packs, trial_of

_GRADIENT_BOUND = 1e-3
_SEED = 12345


def verify_folder(folder: Path, say: Callable[[str], None]) -> tuple[dict[str, float], int, int]:
    """Try the model of a folder with its own weights and its head, where that is known.

    Returns:
        The largest differences as shares of the largest output, or of the gradient's norm; packs; their sequences.

    Raises:
        FailedError: packed sequences are not what each is alone.
    """
    kind = getattr(transformers, architecture_of(folder), transformers.AutoModel)
    model = read_model(folder, kind)
    head, _ = head_of(model)
    say(f"verify-model: {type(model).__name__} of transformers {transformers.__version__}")
    try:
        feeding = feeding_of(model.base_model)
        packed = PackedModel(model, feeding, head)
        tried = packed.try_packs(training=True)
        differences = {"outputs": tried.difference}
        if head is not None:
            differences["answers"] = packed.try_head()
        length = tokens_of_packs(model.config, feeding.position_offset)
        rows, _ = random_packs(model.config, length, _SEED, feeding.longest_sequence, feeding.unpacked_token)
        differences["gradient"] = _gradient_difference(model.base_model, feeding, rows)
    except InputError as error:
        raise FailedError(f"{folder}: {error}") from error
    say(f"verify-model:   in rows of up to {tried.row_tokens:,} tokens, and in training mode, no neighbour is seen")
    for name, difference in differences.items():
        say(f"verify-model:   {name}: packed and alone differ by {difference:.1e} of the largest value")
    return differences, len(rows), sum(len(row["seq_lens"]) for row in rows)


def _gradient_difference(encoder: Any, feeding: Feeding, rows: list[Row]) -> float:
    """Measure how far the gradients of packs and of their sequences alone differ, as a share of their norm.

    The loss is a sum of all outputs of the sequences, each times a random number.
    """
    model = fed_module(encoder, feeding)
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    gradients = []
    with trial_of(encoder), torch.enable_grad():
        packed = sequences_of(outputs_of(model, packed_batch(rows, feeding)), rows)
        for outputs in (packed, alone_outputs(model, feeding, rows)):
            random = torch.Generator().manual_seed(_SEED)
            loss = torch.stack([(each * torch.randn(each.shape, generator=random)).sum() for each in outputs]).sum()
            of_weights = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            gradients.append(torch.cat([each.flatten().float().cpu() for each in of_weights]))
    difference = float(torch.linalg.vector_norm(gradients[0] - gradients[1]) / torch.linalg.vector_norm(gradients[1]))
    if not difference <= _GRADIENT_BOUND:
        raise InputError(f"gradients of packed sequences and of each alone differ by {difference:.1e} of their norm")
    return difference
