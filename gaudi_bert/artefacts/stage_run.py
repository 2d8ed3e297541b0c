"""How a stage runs: with how many workers, and whether it does all of the work or one part of it.

Machine K of N does part (K, N): of the groups that the stage writes (or of the files that it reads) number K, K + N, ...
Where a last file is written when all groups are there, a run that does nothing else is the one with `finish`.
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
    """One run of a stage; no byte of the result depends on it.

    Attributes:
        reporter: where progress is reported.
        overwrite: replace the result of other settings, which is refused otherwise.
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
        """Return those of `groups` that belong to this part."""
        number, parts = self.part or (0, 1)
        return groups[number::parts]
