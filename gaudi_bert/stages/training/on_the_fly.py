"""Unpacked records, packed by a plan while they are read, as numpy batches for any trainer (no TensorFlow)."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.records.read.on_the_fly import OnTheFlyPacking, planned_groups
from gaudi_bert.records.schema import PackedSchema


def open_on_the_fly(
    records: str | Path,
    plan: Path,
    *,
    batch_packs: int,
    seed: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    workers: int | None = None,
) -> OnTheFlyPacking:
    """The records of a plan as batches.

    Args:
        records: the RECORDS that the plan was made for.
        plan: plan.json.
        batch_packs: packs of one batch on one rank.
        seed: of the pairings and orders; the plan's when None.
        rank, world_size: which share of the packs this process takes.
        workers: threads that read a group; None for all cores.
    """
    content, groups = planned_groups(records, plan)
    return OnTheFlyPacking(
        groups,
        PackedSchema.of(content),
        batch_packs=batch_packs,
        seed=content.seed if seed is None else seed,
        rank=rank,
        world_size=world_size,
        workers=workers,
    )
