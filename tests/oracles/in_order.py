"""First fit and best fit with limits, pack by pack: what the trees must equal."""

from __future__ import annotations

from collections.abc import Sequence


def packs_in_order(
    lengths: Sequence[int], capacity: int, depth: int, batch: int | None, open_packs: int | None, *, tightest: bool
) -> int:
    closed, packs = 0, []
    for index, length in enumerate(lengths):
        if batch is not None and index % batch == 0:
            closed, packs = closed + len(packs), []
        fitting = [pack for pack in packs if sum(pack) + length <= capacity and len(pack) < depth]
        if not fitting and len(packs) == open_packs:
            closed, packs = closed + len(packs), []
        if fitting:
            # Of packs with the same room, the one that was changed last.
            pack = min(fitting, key=lambda pack: capacity - sum(pack)) if tightest else fitting[0]
        else:
            pack = []
            packs.insert(0, pack) if tightest else packs.append(pack)
        pack.append(length)
        if tightest:
            packs.remove(pack) if pack in packs else None
            packs.insert(0, pack)
    return closed + len(packs)
