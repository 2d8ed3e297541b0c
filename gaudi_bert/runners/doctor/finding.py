"""One line of what `gaudi-bert doctor` says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Finding", "fine", "mend", "warn"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: what was looked at.
        verdict: `ok`; `warning`, which may do; or `mend`, which will not.
        found: what is there.
        remedy: what to do; empty where all is well.
    """

    check: str
    verdict: Literal["ok", "warning", "mend"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.verdict:<7}  {self.check}: {self.found}{remedy}"

    def as_json(self) -> dict[str, str]:
        """The finding for machines."""
        return asdict(self)


def fine(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """It may do."""
    return Finding(check, "warning", found, remedy)


def mend(check: str, found: str, remedy: str) -> Finding:
    """It will not do."""
    return Finding(check, "mend", found, remedy)
