"""Opening unpacked records and their plan, to be packed while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaudi_bert.records.read.on_the_fly import OnTheFlyGroup, OnTheFlyPacking
    from gaudi_bert.training.input.source import DataSource

__all__ = ["on_the_fly_source", "open_on_the_fly"]


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
    """The records of a plan as numpy batches, for any trainer.

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
    from gaudi_bert.records.read.on_the_fly import OnTheFlyPacking
    from gaudi_bert.records.read.planned import planned_groups
    from gaudi_bert.records.schema import PackedSchema

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


def on_the_fly_source(records: str | Path, plan: Path) -> DataSource:
    """The records of a plan as a source of our trainer.

    Raises:
        InputError: as `open_on_the_fly`.
    """
    from gaudi_bert.records.read.planned import planned_groups
    from gaudi_bert.records.schema import PackedSchema
    from gaudi_bert.training.input.source import DataSource

    content, groups = planned_groups(records, plan)
    packs = sum(group.packs for group in groups)
    return DataSource(
        path=Path(records),
        schema=PackedSchema.of(content),
        files=(),
        packing_factor=sum(file.sequences for file in content.files) / packs,
        efficiency=_tokens(groups) / (packs * content.max_sequence_length),
        vocabulary_size=None if content.vocabulary is None else content.vocabulary.size,
        identity=content.sha256,
        on_the_fly=tuple(groups),
    )


def _tokens(groups: list[OnTheFlyGroup]) -> int:
    return sum(sum(lengths) * count for group in groups for lengths, count in group.strategies)
