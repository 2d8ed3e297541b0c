"""The result of one check of `gaudi-bert doctor`, and the check of an object store."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.common.files import url_of
from gaudi_bert.config.pipeline import PipelineSettings


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    What has `failed` must be fixed, a `warning` may do; the remedy is empty where all is well.
    """

    check: str
    verdict: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.verdict:<7}  {self.check}: {self.found}{remedy}"

    def as_json(self) -> dict[str, str]:
        """The outcome for machines."""
        return asdict(self)


def passed(check: str, finding: str) -> CheckResult:
    """Return that all is well."""
    return CheckResult(check, "ok", finding)


def warning(check: str, finding: str, remedy: str) -> CheckResult:
    """Return what may do."""
    return CheckResult(check, "warning", finding, remedy)


def failed(check: str, finding: str, remedy: str) -> CheckResult:
    """Return what must be fixed."""
    return CheckResult(check, "failed", finding, remedy)


def refused(check: str, error: GaudiBertError) -> CheckResult:
    """Return a refusal in the words of its error."""
    finding, _, remedy = str(error).rpartition("; ")
    return failed(check, finding, remedy)


def examine_store(url: str, settings: PipelineSettings) -> CheckResult:
    """Check that one object below `url` can be written, read, listed and removed; the object is removed again."""
    folder = url_of(url)
    name, content = f"gaudi-bert-doctor-{os.urandom(8).hex()}", os.urandom(64)
    # Once or twice, not for as long as a stage would wait.
    objects = Objects(settings.store.model_copy(update={"attempts": min(settings.store.attempts, 3)}))
    written = False
    try:
        objects.write(f"{folder}/{name}", content)
        written = True
        if objects.read(f"{folder}/{name}") != content or name not in objects.list(folder, only_here=True):
            return failed("store", f"{folder}: an object is not what was written", "use a store that reads what it wrote")
        objects.remove(f"{folder}/{name}")
    except GaudiBertError as error:
        if written:
            with suppress(GaudiBertError):
                objects.remove(f"{folder}/{name}")
        return refused("store", error)
    return passed("store", f"{folder}: write, read, list and remove")
