"""The volume of a pipeline: an existing claim, a storage class, or a volume created by hand; or an object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.doctor.answers import ClusterAnswers
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning
from gaudi_bert.runners.kubernetes.manifests import work_claim_name
from gaudi_bert.runners.kubernetes.volumes import (
    ALONE,
    SHARED,
    find_class,
    has_several_workers,
    shares_volumes,
    sharing_remedy,
)
from gaudi_bert.runners.resources import quantity_value

Json = dict[str, Any]

# The provisioner of a class whose volumes are created by hand.
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
    spec = claim.get("spec", {})
    modes = spec.get("accessModes") or [kubernetes.access_mode]
    remedy = sharing_remedy(settings, exists=True)
    if kubernetes.access_mode == SHARED and SHARED not in modes:
        finding = f"the claim {name}, {', '.join(modes)}: kubernetes.access_mode is {SHARED}, and a claim cannot be changed"
        return failed("storage", finding, f"{remedy}; or set kubernetes.access_mode to {ALONE}")
    storage_class = find_class(answers.storage_classes or (), spec.get("storageClassName"))
    return _check_access_modes(answers, settings, f"the claim {name}", modes, remedy, storage_class)


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
    chosen = find_class(answers.storage_classes, settings.kubernetes.storage_class)
    storage_class = chosen["metadata"]["name"] if chosen is not None else settings.kubernetes.storage_class
    mode, remedy = settings.kubernetes.access_mode, sharing_remedy(settings, exists=False)
    if chosen is not None and chosen.get("provisioner") != _NO_PROVISIONER:
        return _check_access_modes(answers, settings, f"class {storage_class}", [mode], remedy, chosen)
    missing = f"no class {storage_class}" if storage_class else "no default storage class"
    if chosen is not None:
        missing = f"class {storage_class} provisions nothing"
    if answers.volumes is None:
        by_hand = "ask whether there is a volume of that size and access mode without claim"
        return warning("storage", f"{missing}, and this account may not list volumes", by_hand)
    volume, reason = _volume_for_claim(answers.volumes, storage_class or "", settings)
    if volume is not None:
        return _check_access_modes(answers, settings, f"volume {volume['metadata']['name']}", [mode], remedy)
    able = [item["metadata"]["name"] for item in answers.storage_classes if item.get("provisioner") != _NO_PROVISIONER]
    return failed(
        "storage",
        f"{missing}, and {reason}",
        f"set kubernetes.storage_class to one of: {', '.join(able) or 'there is none'}",
    )


def _check_access_modes(
    answers: ClusterAnswers,
    settings: PipelineSettings,
    finding: str,
    modes: Sequence[str],
    remedy: str,
    storage_class: Json | None = None,
) -> CheckResult:
    """Several pods on several nodes need a volume that all of them can mount."""
    workers, nodes, shown = settings.resources.workers, len(answers.nodes or ()), ", ".join(modes)
    if nodes < 2 or SHARED in modes or shares_volumes(storage_class):
        return passed("storage", f"{finding}, {shown}")
    if has_several_workers(settings):
        return failed("storage", f"{finding}, {shown}: {workers} workers may run on several of the {nodes} nodes", remedy)
    if settings.resources.data_workers > 1:
        return warning("storage", f"{finding}, {shown}: all pods must share one of the {nodes} nodes", remedy)
    return passed("storage", f"{finding}, {shown}")


def _volume_for_claim(volumes: Sequence[Json], storage_class: str, settings: PipelineSettings) -> tuple[Json | None, str]:
    """The volume, created by hand, that the claim of the work folder would be bound to; or why there is none."""
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
