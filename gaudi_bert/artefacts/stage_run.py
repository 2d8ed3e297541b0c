"""How a stage runs: with how many workers, over what other settings made, and on all of its work or on a part of it.

Many machines share a stage: machine K of N does part (K, N), which is the groups K, K + N, ... of what the stage makes.
Where a last file is written when all groups are there, `finish` is the step that writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from gaudi_bert.config.places import StoreSettings

_Group = TypeVar("_Group")


@dataclass(frozen=True)
class StageRun:
    """One run of a stage. What the stage makes in the end does not depend on it.

    Attributes:
        reporter: what is told of the work.
        overwrite: replace what was made with other settings, which is refused otherwise.
        workers: processes or threads; None for one per core.
        store: how object stores are reached; None for the defaults.
        part: (K, N), to do only part K of N; None for all parts.
        finish: do no part, but check that all are there, and write what is written last.
    """

    reporter: Reporter
    overwrite: bool = False
    workers: int | None = None
    store: StoreSettings | None = None
    part: tuple[int, int] | None = None
    finish: bool = False

    def __post_init__(self) -> None:
        if self.part is not None and self.finish:
            raise InputError("--finish and --shard exclude each other; run the shards first, then --finish once")

    @property
    def does_all(self) -> bool:
        """Whether it does all parts, and finishes."""
        return self.part is None and not self.finish

    def share_of(self, groups: Sequence[_Group]) -> Sequence[_Group]:
        """Those of `groups` that belong to its part."""
        number, parts = self.part or (0, 1)
        return groups[number::parts]
