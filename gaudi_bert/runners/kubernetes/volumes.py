"""Whether the workers of an MPIJob, which may run on several nodes, can all mount the volume of a pipeline.

A claim cannot be changed, and holds the packed data when training needs it. So this is settled before it is created.
"""

from __future__ import annotations

from collections.abc import Sequence

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster, Json
from gaudi_bert.runners.kubernetes.manifests import work_claim_name

SHARED, ALONE = "ReadWriteMany", "ReadWriteOnce"
# Network file systems that attach nothing to a node, so that any number of nodes mount a claim, whatever its mode.
_SHARING = (
    *("nfs.csi.k8s.io", "nfs-subdir-external-provisioner", "efs.csi.aws.com", "fsx.csi.aws.com", "file.csi.azure.com"),
    *("kubernetes.io/azure-file", "filestore.csi.storage.gke.io", "csi.juicefs.com"),
)


def has_several_workers(settings: PipelineSettings) -> bool:
    """Whether training needs a volume that several nodes mount."""
    return settings.pretrains and settings.resources.workers > 1 and settings.kubernetes.store is None


def check_access_mode(settings: PipelineSettings) -> None:
    """Refuse settings that no cluster of several nodes can run; the modes of a claim that exists are not known here."""
    if has_several_workers(settings) and settings.kubernetes.access_mode == ALONE and not settings.kubernetes.work_claim:
        raise InputError(_refusal(settings, "kubernetes.access_mode", [ALONE], exists=False))


def check_claim(cluster: Cluster, settings: PipelineSettings, claim: Json | None) -> None:
    """Refuse a claim that exists, or that would be created, if the workers may not all mount it."""
    spec = claim.get("spec", {}) if claim is not None else {}
    modes = spec.get("accessModes") or [settings.kubernetes.access_mode]
    if not has_several_workers(settings) or SHARED in modes:
        return
    if len(cluster.find_everywhere("Node") or ()) < 2:
        return  # One node, or an account that may not list them.
    classes = cluster.find_everywhere("StorageClass") or ()
    if not shares_volumes(find_class(classes, spec.get("storageClassName") or settings.kubernetes.storage_class)):
        raise InputError(_refusal(settings, f"volume claim {work_claim_name(settings)}", modes, exists=claim is not None))


def find_class(classes: Sequence[Json], name: str | None) -> Json | None:
    """The storage class of that name, or the default class; None if there is none."""
    by_name = {item["metadata"]["name"]: item for item in classes}
    return by_name.get(name) if name else next(filter(_is_default, classes), None)


def _is_default(storage_class: Json) -> bool:
    annotations = storage_class["metadata"].get("annotations") or {}
    return annotations.get("storageclass.kubernetes.io/is-default-class") == "true"


def shares_volumes(storage_class: Json | None) -> bool:
    """Whether volumes of a class are known to be mounted by several nodes, whatever the access mode of their claim."""
    return storage_class is not None and str(storage_class.get("provisioner")).endswith(_SHARING)


def sharing_remedy(settings: PipelineSettings, *, exists: bool) -> str:
    """How to get a volume that all nodes can mount; a claim that `exists` has to be removed first."""
    if settings.kubernetes.work_claim:
        return f"set kubernetes.work_claim to a claim that has {SHARED}"
    remedy = f"set kubernetes.access_mode to {SHARED} and kubernetes.storage_class to a class that offers it"
    if exists:
        return f"{remedy}, and remove this claim with its data: gaudi-bert k8s delete PIPELINE --data"
    return f"{remedy}, or kubernetes.work_claim to a claim that all workers can mount"


def _refusal(settings: PipelineSettings, where: str, modes: Sequence[str], *, exists: bool) -> str:
    workers = f"the {settings.resources.workers} workers may run on several nodes"
    return f"{where}: {', '.join(modes)}, but {workers}; {sharing_remedy(settings, exists=exists)}"
