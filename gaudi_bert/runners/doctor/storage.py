"""The volume of a pipeline: an existing claim, a storage class, or a volume made by hand; or an object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.doctor.answers import ClusterAnswers
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning
from gaudi_bert.runners.kubernetes.jobs import work_claim_name
from gaudi_bert.runners.requirements import quantity_value

Json = dict[str, Any]

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
# The provisioner of a class whose volumes are made by hand.
_NO_PROVISIONER = "kubernetes.io/no-provisioner"


def check_storage(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    """The claims that are named must exist; a new one must find a class or a volume."""
    kubernetes = settings.kubernetes
    for key, name in (("work_claim", kubernetes.work_claim), ("data_claim", kubernetes.data_claim)):
        if name and name not in answers.claims and "get persistentvolumeclaims" not in answers.missing_rights:
            remedy = f"set kubernetes.{key} to one of `kubectl get pvc -n {kubernetes.namespace}`"
            return failed("storage", f"no claim {name}", remedy)
    if kubernetes.store:
        return _check_scratch(settings)
    name = work_claim_name(settings)
    claim = answers.claims.get(name)
    if claim is None and kubernetes.work_claim:
        return passed("storage", f"the claim {name}")  # this account may not look at it
    if claim is None:
        return _check_new_claim(answers, settings)
    if claim.get("status", {}).get("phase") == "Lost":
        return failed("storage", f"the claim {name} has lost its volume", "remove it: gaudi-bert k8s delete PIPELINE --data")
    modes = claim.get("spec", {}).get("accessModes") or [kubernetes.access_mode]
    remedy = "set kubernetes.work_claim to a claim that offers ReadWriteMany"
    if not kubernetes.work_claim:
        remedy = "set kubernetes.access_mode to ReadWriteMany, and have it made anew: gaudi-bert k8s delete PIPELINE --data"
    return _check_access_modes(answers, settings, f"the claim {name}", modes, remedy)


def _check_scratch(settings: PipelineSettings) -> CheckResult:
    """Two groups and some shards must find room in a pod's scratch."""
    scratch, group = quantity_value(settings.kubernetes.scratch), settings.packing.group_bytes
    finding = f"{settings.kubernetes.store}, scratch of {settings.kubernetes.scratch}"
    if scratch < 3 * group:
        remedy = "where the records are larger than that, set kubernetes.scratch to three times packing.group_bytes"
        return warning("storage", f"{finding}, a group may have {group / 2**30:.1f} GiB", remedy)
    return passed("storage", finding)


def _check_new_claim(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.storage_classes is None:
        return warning("storage", "this account may not list storage classes", "ask which one offers the access mode")
    classes = {item["metadata"]["name"]: item for item in answers.storage_classes}
    storage_class = settings.kubernetes.storage_class or next(
        (name for name, item in classes.items() if _is_default(item)), None
    )
    mode = settings.kubernetes.access_mode
    remedy = "set kubernetes.access_mode to ReadWriteMany and kubernetes.storage_class to a class that offers it"
    found = classes.get(str(storage_class))
    if found is not None and found.get("provisioner") != _NO_PROVISIONER:
        return _check_access_modes(answers, settings, f"class {storage_class}", [mode], remedy)
    missing = f"no class {storage_class}" if storage_class else "no default storage class"
    if found is not None:
        missing = f"class {storage_class} provisions nothing"
    if answers.volumes is None:
        by_hand = "ask whether there is a volume of that size and access mode without claim"
        return warning("storage", f"{missing}, and this account may not list volumes", by_hand)
    volume, reason = _volume_for_claim(answers.volumes, storage_class or "", settings)
    if volume is not None:
        return _check_access_modes(answers, settings, f"volume {volume['metadata']['name']}", [mode], remedy)
    able = [name for name, item in classes.items() if item.get("provisioner") != _NO_PROVISIONER]
    return failed(
        "storage",
        f"{missing}, and {reason}",
        f"set kubernetes.storage_class to one of: {', '.join(able) or 'there is none'}",
    )


def _check_access_modes(
    answers: ClusterAnswers, settings: PipelineSettings, finding: str, modes: Sequence[str], remedy: str
) -> CheckResult:
    """Several pods on several nodes need a volume that all of them can mount."""
    several = (settings.trains_as_mpijob and settings.resources.workers > 1) or settings.resources.data_workers > 1
    nodes, shown = len(answers.nodes or ()), ", ".join(modes)
    if several and nodes > 1 and "ReadWriteMany" not in modes:
        return warning("storage", f"{finding}, {shown}: all pods must share one of the {nodes} nodes", remedy)
    return passed("storage", f"{finding}, {shown}")


def _is_default(storage_class: Json) -> bool:
    return (storage_class["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"


def _volume_for_claim(volumes: Sequence[Json], storage_class: str, settings: PipelineSettings) -> tuple[Json | None, str]:
    """The volume, made by hand, that the claim of the work folder would be bound to; or why there is none."""
    size, mode = settings.kubernetes.storage, settings.kubernetes.access_mode
    free = [
        volume
        for volume in volumes
        if volume.get("status", {}).get("phase") == "Available"
        and (volume["spec"].get("storageClassName") or "") == storage_class
    ]
    if not free:
        return None, f"no free volume{f' of class {storage_class}' if storage_class else ''}"
    large = [item for item in free if quantity_value(item["spec"]["capacity"]["storage"]) >= quantity_value(size)]
    if not large:
        most = max((item["spec"]["capacity"]["storage"] for item in free), key=quantity_value)
        return None, f"no free volume of {size}: the largest has {most}"
    offering = [item for item in large if mode in (item["spec"].get("accessModes") or ())]
    if not offering:
        offered = ", ".join(sorted({name for item in large for name in item["spec"].get("accessModes") or ()}))
        return None, f"no free volume of {size} offers {mode}: they offer {offered or 'nothing'}"
    return offering[0], ""
