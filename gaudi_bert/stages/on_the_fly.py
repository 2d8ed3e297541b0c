"""Opening unpacked records and their plan as a source of batches that are packed while training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaudi_bert.records.on_the_fly import OnTheFlyPacking

__all__ = ["open_on_the_fly"]


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
    """The records of a plan, to be packed on the fly.

    Args:
        records: the RECORDS that the plan was made for.
        plan: plan.json.
        batch_packs: packs of one batch on one rank.
        seed: of the pairings and orders; the plan's when None.
        rank, world_size: which share of the packs this process takes.
        workers: threads that read a group; None for all cores.

    Raises:
        InputError: the plan is not writable, or the files are not those of the plan.
    """
    from gaudi_bert.records.files import list_record_files
    from gaudi_bert.records.on_the_fly import OnTheFlyGroup, OnTheFlyPacking
    from gaudi_bert.stages.plan_reader import read_plan
    from gaudi_bert.stages.write import match_files

    content = read_plan(plan)
    files = match_files(records, list_record_files(records), content)
    groups = [OnTheFlyGroup(tuple(files[name] for name in group.files), group.strategies) for group in content.groups]
    return OnTheFlyPacking(
        groups,
        content.packed_schema,
        batch_packs=batch_packs,
        seed=content.seed if seed is None else seed,
        rank=rank,
        world_size=world_size,
        workers=workers,
    )
