"""The result of one check of `gaudi-bert doctor`, what a cluster answered, and the check of an object store.

Asking and checking are apart: `ask_*` collects what commands, files and the API answer, and the checks are functions of
those answers alone, so that they are tested on recorded ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Literal

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.common.files import url_of
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Json


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
    """All is well."""
    return CheckResult(check, "ok", finding)


def warning(check: str, finding: str, remedy: str) -> CheckResult:
    """It may do."""
    return CheckResult(check, "warning", finding, remedy)


def failed(check: str, finding: str, remedy: str) -> CheckResult:
    """It will not do."""
    return CheckResult(check, "failed", finding, remedy)


@dataclass(frozen=True)
class ClusterAnswers:
    """What the API server answered; None where this account may not ask.

    `namespace` is None where it does not exist, too, and `pods_are_hidden` tells of the pods of other namespaces. Missing
    rights read as `create jobs`; `claims` are those that the pipeline uses and that exist, `mpi_operator` is that pod's
    image, `local_queues` are Kueue's in the namespace, `secret_keys` the names of what is in `kubernetes.store_secret`,
    never its values, and `pod_classes` the names of all objects of each kind that pods may name.
    """

    version: tuple[int, int]
    namespace: Json | None
    namespace_is_hidden: bool = False
    pods_are_hidden: bool = False
    missing_rights: tuple[str, ...] = ()
    claims: dict[str, Json] = field(default_factory=dict)
    nodes: Sequence[Json] | None = None
    plugin_pods: Sequence[Json] | None = None
    serves_mpijobs: bool | None = None
    serves_trainjobs: bool | None = None
    mpi_operator: str | None = None
    storage_classes: Sequence[Json] | None = None
    volumes: Sequence[Json] | None = None
    local_queues: Sequence[str] | None = None
    secret_keys: Sequence[str] | None = None
    limit_ranges: Sequence[Json] | None = ()
    quotas: Sequence[Json] | None = ()
    pod_classes: Mapping[str, Sequence[str] | None] = field(default_factory=dict)


# --- an object store


def examine_store(url: str, settings: PipelineSettings) -> CheckResult:
    """Whether one object below `url` can be written, read, listed and removed; the object is removed again."""
    folder = url_of(url)
    name, content = f"gaudi-bert-doctor-{os.urandom(8).hex()}", os.urandom(64)
    # Once or twice, not for as long as a stage would wait.
    objects = Objects(settings.store.model_copy(update={"attempts": min(settings.store.attempts, 3)}))
    done: list[str] = []
    try:
        objects.write(f"{folder}/{name}", content)
        done.append("write")
        if objects.read(f"{folder}/{name}") != content:
            return failed(
                "store", f"{folder}: an object was read back as another", "use a store that keeps what it is given"
            )
        done.append("read")
        if name not in objects.list(folder, only_here=True):
            return failed("store", f"{folder}: an object that was written is not listed", "use a store that lists at once")
        done.append("list")
        objects.remove(f"{folder}/{name}")
    except GaudiBertError as error:
        if done:
            with suppress(GaudiBertError):
                objects.remove(f"{folder}/{name}")
        refusal, _, remedy = str(error).rpartition("; ")
        can = f" (it can {', '.join(done)})" if done else ""
        return failed("store", f"{refusal}{can}", remedy)
    return passed("store", f"{folder}: write, read, list and remove")
