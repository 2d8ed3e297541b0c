"""The volume of the work folder: whether all pods can mount it, and which claim of it a run uses, creates or replaces."""

from __future__ import annotations

from collections.abc import Sequence

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster, Json
from gaudi_bert.runners.kubernetes.pods import work_claim_name

_SHARED, _ALONE = "ReadWriteMany", "ReadWriteOnce"
# Network file systems that attach nothing to a node, so that any number of nodes mount a claim, whatever its mode.
_SHARING = (
    *("nfs.csi.k8s.io", "nfs-subdir-external-provisioner", "efs.csi.aws.com", "fsx.csi.aws.com", "file.csi.azure.com"),
    *("kubernetes.io/azure-file", "filestore.csi.storage.gke.io", "csi.juicefs.com"),
)


def find_work_claim(cluster: Cluster, settings: PipelineSettings) -> Json | None:
    """Return the claim of the work folder, where there is one; a claim that no pod can mount is refused.

    So is one of the user's that does not exist, and one that the workers, which may run on several nodes, cannot share.
    """
    kubernetes = settings.kubernetes
    for key in ("work_claim", "data_claim"):
        name = getattr(kubernetes, key)
        if name and _usable_claim(cluster, name) is None:
            raise InputError(f"kubernetes.{key}: no claim {name} in namespace {cluster.namespace}; see `kubectl get pvc`")
    if kubernetes.store:
        return None
    claim = _usable_claim(cluster, work_claim_name(settings))
    _check_sharing(cluster, settings, claim)
    return claim


def _usable_claim(cluster: Cluster, name: str) -> Json | None:
    claim = cluster.read("PersistentVolumeClaim", name)
    if claim is not None and "deletionTimestamp" in claim["metadata"]:
        raise InputError(f"volume claim {name} is being removed; wait until it is gone, and no pod mounts it any more")
    if claim is not None and claim.get("status", {}).get("phase") == "Lost":
        raise InputError(f"volume claim {name} has lost its volume; remove it with `gaudi-bert k8s delete PIPELINE --data`")
    return claim


def is_to_be_made_anew(cluster: Cluster, settings: PipelineSettings, claim: Json) -> bool:
    """Whether a claim of the pipeline got no volume, and is not what the pipeline asks for by now: it holds nothing."""
    spec = claim["spec"]
    if settings.kubernetes.work_claim or claim.get("status", {}).get("phase") != "Pending" or spec.get("volumeName"):
        return False
    class_to_use = settings.kubernetes.storage_class
    if class_to_use is None:
        default = _find_class(cluster.find("StorageClass", if_allowed=True), None)
        class_to_use = default["metadata"]["name"] if default else spec.get("storageClassName")
    return bool(class_to_use != spec.get("storageClassName")) or spec.get("accessModes") != [settings.kubernetes.access_mode]


# --- whether the workers, which may run on several nodes, can all mount the volume of a pipeline
#
# A claim cannot be changed, and holds the packed data when training needs it. So this is settled before it is created.


def _has_several_workers(settings: PipelineSettings) -> bool:
    """Whether training needs a volume that several nodes mount."""
    return settings.pretrains and settings.resources.workers > 1 and settings.kubernetes.store is None


def check_access_mode(settings: PipelineSettings) -> None:
    """Refuse settings that no cluster of several nodes can run; the modes of a claim that exists are not known here."""
    if _has_several_workers(settings) and settings.kubernetes.access_mode == _ALONE and not settings.kubernetes.work_claim:
        raise _refusal(settings, "kubernetes.access_mode", [_ALONE])


def _check_sharing(cluster: Cluster, settings: PipelineSettings, claim: Json | None) -> None:
    spec = claim.get("spec", {}) if claim is not None else {}
    modes = spec.get("accessModes") or [settings.kubernetes.access_mode]
    if not _has_several_workers(settings) or _SHARED in modes:
        return
    if len(cluster.find("Node", if_allowed=True)) < 2:
        return  # One node, or an account that may not list them.
    classes = cluster.find("StorageClass", if_allowed=True)
    storage_class = _find_class(classes, spec.get("storageClassName") or settings.kubernetes.storage_class) or {}
    if not str(storage_class.get("provisioner")).endswith(_SHARING):
        raise _refusal(settings, f"volume claim {work_claim_name(settings)}", modes)


def _find_class(classes: Sequence[Json], name: str | None) -> Json | None:
    """Return the storage class of that name, or the default class; None if there is none."""
    if name:
        return next((item for item in classes if item["metadata"]["name"] == name), None)
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    return next((item for item in classes if default.items() <= (item["metadata"].get("annotations") or {}).items()), None)


def _refusal(settings: PipelineSettings, where: str, modes: Sequence[str]) -> InputError:
    remedy = (
        f"set kubernetes.access_mode to {_SHARED} and kubernetes.storage_class to a class that has it (an older claim goes "
        "with its data: gaudi-bert k8s delete PIPELINE --data), or kubernetes.work_claim to a claim that has it"
    )
    workers = f"the {settings.resources.workers} workers may run on several nodes"
    return InputError(f"{where}: {', '.join(modes)}, but {workers}; {remedy}")
