"""Trainer's arguments for padded rows, translated for packs: the rules of `gaudi-bert train --dry-run`.

A row holds f sequences instead of one (f: the packing factor). Either an update keeps its sequences and takes 1 / f of the
rows (`correction="batch"`), or it keeps its rows, sees f times the sequences, and there are 1 / f of the updates, with
moments that decay f times as fast (`"betas"`; Krell et al. 2021, theorem D.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from gaudi_bert.common.errors import InputError

__all__ = ["translate_arguments"]

STEPS = ("max_steps", "warmup_steps", "logging_steps", "save_steps", "eval_steps")


def translate_arguments(
    arguments: Mapping[str, Any],
    packing_factor: float,
    *,
    processes: int = 1,
    batch_packs: int | None = None,
    correction: Literal["batch", "betas"] = "batch",
) -> dict[str, Any]:
    """`TrainingArguments` by name, for packs.

    Args:
        arguments: as for padded rows; what is not named in them is left to Trainer's defaults.
        packing_factor: sequences per pack, at least 1: in the data's metadata.json.
        processes: that train together.
        batch_packs: packs of a micro-batch; `per_device_train_batch_size` when None.
        correction: what is kept: the sequences of an update (`batch`) or its rows (`betas`).

    Returns:
        A copy with `per_device_train_batch_size`, `gradient_accumulation_steps` and, for `betas`, `adam_beta1`, `adam_beta2`
        and the numbers of steps changed, and `remove_unused_columns=False`.

    Raises:
        InputError: the factor is below 1, or `correction` is neither.
    """
    if packing_factor < 1:
        raise InputError(f"packing_factor = {packing_factor}: at least 1 is possible; take it from the data's metadata.json")
    if correction not in ("batch", "betas"):
        raise InputError(f"correction = {correction!r}: batch or betas is allowed")
    found = dict(arguments)
    micro_batch, accumulation = found.get("per_device_train_batch_size", 8), found.get("gradient_accumulation_steps", 1)
    packs = batch_packs or micro_batch
    sequences = micro_batch * accumulation * processes * (packing_factor if correction == "betas" else 1)
    found["per_device_train_batch_size"] = packs
    found["gradient_accumulation_steps"] = max(1, round(sequences / (packs * packing_factor * processes)))
    found["remove_unused_columns"] = False
    if correction == "betas":
        for name, usual in (("adam_beta1", 0.9), ("adam_beta2", 0.999)):
            found[name] = found.get(name, usual) ** packing_factor
        for name in STEPS:
            if found.get(name, 0) >= 1:  # below 1 it is a share of all steps, or none at all
                found[name] = max(1, round(found[name] / packing_factor))
    return found
