"""One line of what `gaudi-bert doctor` says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["CheckResult", "failed", "passed", "warning"]


@dataclass(frozen=True)
class CheckResult:
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
        """The outcome for machines."""
        return asdict(self)


def passed(check: str, found: str) -> CheckResult:
    """All is well."""
    return CheckResult(check, "ok", found)


def warning(check: str, found: str, remedy: str) -> CheckResult:
    """It may do."""
    return CheckResult(check, "warning", found, remedy)


def failed(check: str, found: str, remedy: str) -> CheckResult:
    """It will not do."""
    return CheckResult(check, "mend", found, remedy)
