"""Whether the volume with the work folder can be had: an existing claim, a storage class, or a volume made by hand."""

from __future__ import annotations

from typing import Any

from gaudi_bert.artefacts.store.location import scheme_of
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.doctor.check_result import CheckResult, failed, passed, warning
from gaudi_bert.runners.doctor.cluster_answers import ClusterAnswers
from gaudi_bert.runners.kubernetes.pods import work_claim_name
from gaudi_bert.runners.pod_resources import quantity_value
from gaudi_bert.runners.store_environment import OF_STORES

__all__ = ["check_secret", "check_storage"]

Json = dict[str, Any]

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def check_storage(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    """The claims that are named must be there; a new one must find a class or a volume."""
    kubernetes = settings.kubernetes
    for key, name in (("work_claim", kubernetes.work_claim), ("data_claim", kubernetes.data_claim)):
        if name and name not in answers.claims and "get persistentvolumeclaims" not in answers.missing_rights:
            remedy = f"set kubernetes.{key} to one of `kubectl get pvc -n {kubernetes.namespace}`"
            return failed("storage", f"no claim {name}", remedy)
    if kubernetes.store:
        return _check_scratch(settings)
    name = work_claim_name(settings)
    phase = answers.claims.get(name, {}).get("status", {}).get("phase")
    if phase == "Lost":
        return failed("storage", f"the claim {name} has lost its volume", "remove it: gaudi-bert k8s delete PIPELINE --data")
    if phase == "Bound" or kubernetes.work_claim:
        return _check_access_mode(answers, settings, f"the claim {name}")
    return _check_new_claim(answers, settings)


def _check_scratch(settings: PipelineSettings) -> CheckResult:
    """Two groups and some shards must find room in a pod's scratch."""
    scratch, group = quantity_value(settings.kubernetes.scratch), settings.packing.group_bytes
    found = f"{settings.kubernetes.store}, scratch of {settings.kubernetes.scratch}"
    if scratch < 3 * group:
        remedy = "where the records are larger than that, set kubernetes.scratch to three times packing.group_bytes"
        return warning("storage", f"{found}, a group may have {group / 2**30:.1f} GiB", remedy)
    return passed("storage", found)


def check_secret(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    """The Secret with the store's credentials must be there, and have what the store's library reads."""
    name, namespace = settings.kubernetes.store_secret, settings.kubernetes.namespace
    if answers.secret_keys is None:
        remedy = f"ask whether there is one called {name}; pods need it, a run does not read it"
        return warning("store secret", "this account may not get secrets", remedy)
    if not answers.secret_keys:
        remedy = (
            f"kubectl -n {namespace} create secret generic {name} --from-literal=NAME=VALUE ..., or correct store_secret"
        )
        return failed("store secret", f"no Secret {name}, or an empty one", remedy)
    known = OF_STORES.get(scheme_of(settings.kubernetes.store or ""))
    if known and not any(key.startswith(known.prefixes) for key in answers.secret_keys):
        names = f"it has {', '.join(answers.secret_keys)}, none of them {'* or '.join(known.prefixes)}*"
        return warning("store secret", f"{name}: {names}", "name its keys as the store's own variables are called")
    return passed("store secret", f"{name}: {', '.join(answers.secret_keys)}")


def _check_new_claim(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.storage_classes is None:
        return warning("storage", "this account may not list storage classes", "ask which one offers the access mode")
    classes = {item["metadata"]["name"]: item for item in answers.storage_classes}
    wanted = settings.kubernetes.storage_class or next((name for name, item in classes.items() if _is_default(item)), None)
    if wanted in classes:
        return _check_access_mode(answers, settings, f"class {wanted}")
    missing = f"no class {wanted}" if wanted else "no default storage class"
    if answers.volumes is None:
        remedy = "ask whether there is a volume of that size and access mode without claim"
        return warning("storage", f"{missing}, and this account may not list volumes", remedy)
    volume = next((item for item in answers.volumes if _suits(item, settings)), None)
    if volume is not None:
        return _check_access_mode(answers, settings, f"volume {volume['metadata']['name']}")
    remedy = f"set kubernetes.storage_class to one of: {', '.join(classes) or 'none is there'}"
    return failed("storage", f"{missing}, and no free volume of {settings.kubernetes.storage}", remedy)


def _check_access_mode(answers: ClusterAnswers, settings: PipelineSettings, found: str) -> CheckResult:
    """Several pods on several nodes need a volume that all of them can mount."""
    several = (settings.trains_as_mpijob and settings.resources.workers > 1) or settings.resources.data_workers > 1
    nodes, mode = len(answers.nodes or ()), settings.kubernetes.access_mode
    if several and nodes > 1 and mode == "ReadWriteOnce" and not settings.kubernetes.work_claim:
        remedy = "set kubernetes.access_mode to ReadWriteMany and kubernetes.storage_class to a class that offers it"
        return warning("storage", f"{found}, ReadWriteOnce: all pods must share one of the {nodes} nodes", remedy)
    return passed("storage", found if settings.kubernetes.work_claim else f"{found}, {mode}")


def _is_default(storage_class: Json) -> bool:
    return (storage_class["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"


def _suits(volume: Json, settings: PipelineSettings) -> bool:
    """Whether the claim of the work folder would be bound to this volume, which somebody made by hand."""
    spec, kubernetes = volume["spec"], settings.kubernetes
    return (
        volume.get("status", {}).get("phase") == "Available"
        and (spec.get("storageClassName") or "") == (kubernetes.storage_class or "")
        and kubernetes.access_mode in (spec.get("accessModes") or ())
        and quantity_value(spec["capacity"]["storage"]) >= quantity_value(kubernetes.storage)
    )
