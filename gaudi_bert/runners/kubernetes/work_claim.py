"""Find the volume claim of the work folder, and check that all workers can mount it.

Workers may run on several nodes, and a claim cannot be changed after it was created. So a run checks first whether several
nodes can mount the volume at once. `check_volume_access_mode` uses only the settings, and the other functions read the
cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster, Json
from gaudi_bert.runners.kubernetes.pods import work_claim_name

_MANY_NODES, _ONE_NODE = "ReadWriteMany", "ReadWriteOnce"
# These provisioners create volumes on network file systems, which are not attached to one node. Several nodes can therefore
# mount such a volume, regardless of the access mode of its claim.
_NETWORK_FILE_SYSTEMS = (
    *("nfs.csi.k8s.io", "nfs-subdir-external-provisioner", "efs.csi.aws.com", "fsx.csi.aws.com", "file.csi.azure.com"),
    *("kubernetes.io/azure-file", "filestore.csi.storage.gke.io", "csi.juicefs.com"),
)


def find_work_volume_claim(cluster: Cluster, settings: PipelineSettings) -> Json | None:
    """Return the volume claim of the work folder, or None if the claim does not exist yet or an object store is used.

    Raises:
        InputError: A claim that the settings name does not exist, a claim is being deleted or has lost its volume, or the
            workers may run on several nodes and only one node can mount the claim.
    """
    kubernetes = settings.kubernetes
    for key in ("work_claim", "data_claim"):
        name = getattr(kubernetes, key)
        if name and _read_usable_claim(cluster, name) is None:
            raise InputError(
                f"kubernetes.{key}: claim {name} does not exist in namespace {cluster.namespace}; see `kubectl get pvc`"
            )
    if kubernetes.store:
        return None
    claim = _read_usable_claim(cluster, work_claim_name(settings))
    _check_workers_can_share_claim(cluster, settings, claim)
    return claim


def _read_usable_claim(cluster: Cluster, claim_name: str) -> Json | None:
    """Return a volume claim that pods can mount, or None if it does not exist.

    Raises:
        InputError: The claim is being deleted, or has lost its volume.
    """
    claim = cluster.read_object("PersistentVolumeClaim", claim_name)
    if claim is not None and "deletionTimestamp" in claim["metadata"]:
        raise InputError(f"volume claim {claim_name} is being deleted; wait until no pod mounts it and it is gone")
    if claim is not None and claim.get("status", {}).get("phase") == "Lost":
        raise InputError(
            f"volume claim {claim_name} has lost its volume; delete it with `gaudi-bert k8s delete PIPELINE --data`"
        )
    return claim


def should_recreate_claim(cluster: Cluster, settings: PipelineSettings, claim: Json) -> bool:
    """Return whether to delete and recreate the volume claim of a pipeline because its settings have changed.

    This is True only if the claim has no volume yet, so that no data are lost, and if its storage class or access mode
    differs from the settings.
    """
    spec = claim["spec"]
    if settings.kubernetes.work_claim or claim.get("status", {}).get("phase") != "Pending" or spec.get("volumeName"):
        return False
    class_to_use = settings.kubernetes.storage_class
    if class_to_use is None:
        default = _find_storage_class(cluster.list_objects("StorageClass", empty_if_forbidden=True), None)
        class_to_use = default["metadata"]["name"] if default else spec.get("storageClassName")
    return bool(class_to_use != spec.get("storageClassName")) or spec.get("accessModes") != [settings.kubernetes.access_mode]


def _has_workers_sharing_volume(settings: PipelineSettings) -> bool:
    """Return whether several training workers use the same volume, so that several nodes may have to mount it."""
    return settings.has_pretraining and settings.resources.workers > 1 and settings.kubernetes.store is None


def check_volume_access_mode(settings: PipelineSettings) -> None:
    """Check that several workers do not share a volume that only one node can mount.

    Only the settings are checked. If `kubernetes.work_claim` names an existing claim, nothing is checked, because the
    settings do not contain the access modes of that claim.

    Raises:
        InputError: There are several workers, and `kubernetes.access_mode` is `ReadWriteOnce`.
    """
    kubernetes = settings.kubernetes
    if _has_workers_sharing_volume(settings) and kubernetes.access_mode == _ONE_NODE and not kubernetes.work_claim:
        raise _access_mode_error(settings, "kubernetes.access_mode", [_ONE_NODE])


def _check_workers_can_share_claim(cluster: Cluster, settings: PipelineSettings, claim: Json | None) -> None:
    """Check that all workers can mount the volume claim of the work folder.

    If the claim does not exist yet, check the claim that the run would create.

    Raises:
        InputError: The workers may run on several nodes, and only one node can mount the claim.
    """
    spec = claim.get("spec", {}) if claim is not None else {}
    modes = spec.get("accessModes") or [settings.kubernetes.access_mode]
    if not _has_workers_sharing_volume(settings) or _MANY_NODES in modes:
        return
    if len(cluster.list_objects("Node", empty_if_forbidden=True)) < 2:
        return  # there is only one node, or the account may not list the nodes
    classes = cluster.list_objects("StorageClass", empty_if_forbidden=True)
    storage_class = _find_storage_class(classes, spec.get("storageClassName") or settings.kubernetes.storage_class) or {}
    if not str(storage_class.get("provisioner")).endswith(_NETWORK_FILE_SYSTEMS):
        raise _access_mode_error(settings, f"volume claim {work_claim_name(settings)}", modes)


def _find_storage_class(storage_classes: Sequence[Json], class_name: str | None) -> Json | None:
    """Return the storage class with this name, or the default class if the name is None. Return None if there is no such
    class.
    """
    if class_name:
        return next((item for item in storage_classes if item["metadata"]["name"] == class_name), None)
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    return next(
        (item for item in storage_classes if default.items() <= (item["metadata"].get("annotations") or {}).items()), None
    )


def _access_mode_error(settings: PipelineSettings, subject: str, access_modes: Sequence[str]) -> InputError:
    """Return the error that is raised if workers would share a volume that only one node can mount.

    Args:
        settings: The settings of the pipeline.
        subject: The setting or the claim with these access modes, for the message.
        access_modes: The access modes.
    """
    remedy = (
        f"set kubernetes.access_mode to {_MANY_NODES}, and kubernetes.storage_class to a class that supports it, or set "
        "kubernetes.work_claim to a claim with this access mode (`gaudi-bert k8s delete PIPELINE --data` deletes an "
        "existing claim and its data)"
    )
    workers = f"the {settings.resources.workers} workers may run on several nodes"
    return InputError(f"{subject}: only one node can mount a {', '.join(access_modes)} volume, but {workers}; {remedy}")
