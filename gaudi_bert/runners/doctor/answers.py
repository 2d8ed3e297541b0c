"""What a cluster answers about its version, rights, nodes and storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster, ForbiddenError, Json, NotFoundError, needed_rights
from gaudi_bert.runners.kubernetes.pods import work_claim_name


@dataclass(frozen=True)
class ClusterAnswers:
    """What the API server answered; None where this account may not ask.

    `namespace` is None where it does not exist, too, and `pods_are_hidden` tells of the pods of other namespaces. Missing
    rights read as `create jobs`; `claims` are those that the pipeline uses and that exist, `mpi_operator` is that pod's
    image, `local_queues` are Kueue's in the namespace, `secret_keys` the names of what is in `kubernetes.store_secret`,
    never its values, and `pod_classes` the names of all objects of each kind in `_POD_CLASSES`.
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


def ask_cluster(cluster: Cluster, settings: PipelineSettings) -> ClusterAnswers:
    """Ask the cluster for all that matters to `settings`."""
    version = cluster.version()
    namespace, is_hidden = _ask_namespace(cluster)
    pods = cluster.find_everywhere("Pod")
    plugin_pods = None if pods is None else [pod for pod in pods if "device-plugin" in _images(pod) and _is_gaudi(pod)]
    rights = needed_rights(
        training="nodes" if settings.needs_service else settings.training_kind,
        queue=settings.kubernetes.queue is not None,
        network_policy=settings.has_network_policy,
    )
    return ClusterAnswers(
        version=version,
        namespace=namespace,
        namespace_is_hidden=is_hidden,
        pods_are_hidden=pods is None,
        missing_rights=tuple(str(right) for right in rights if not cluster.is_allowed(right)),
        claims=_claims(cluster, settings),
        nodes=cluster.find_everywhere("Node"),
        plugin_pods=plugin_pods,
        serves_mpijobs=cluster.serves("MPIJob"),
        serves_trainjobs=cluster.serves("TrainJob") if settings.training_kind == "trainjob" else None,
        mpi_operator=next((image for pod in pods or () for image in _images(pod).split() if "mpi-operator" in image), None),
        storage_classes=cluster.find_everywhere("StorageClass"),
        volumes=cluster.find_everywhere("PersistentVolume"),
        local_queues=_local_queues(cluster) if settings.kubernetes.queue else None,
        secret_keys=_secret_keys(cluster, settings.kubernetes.store_secret),
        limit_ranges=_find(cluster, "LimitRange"),
        quotas=_find(cluster, "ResourceQuota"),
        pod_classes={kind: _names(cluster.find_everywhere(kind)) for kind in {kind for kind, *_ in named_classes(settings)}},
    )


def _ask_namespace(cluster: Cluster) -> tuple[Json | None, bool]:
    """The namespace, and whether this account may not look at it."""
    try:
        return cluster.read_namespace(), False
    except (ForbiddenError, NotFoundError) as error:
        return None, isinstance(error, ForbiddenError)


def _claims(cluster: Cluster, settings: PipelineSettings) -> dict[str, Json]:
    claims = {}
    for name in filter(None, (work_claim_name(settings), settings.kubernetes.data_claim)):
        try:
            claim = cluster.read("PersistentVolumeClaim", name)
        except ForbiddenError:
            continue  # The missing right is reported by itself.
        if claim is not None:
            claims[name] = claim
    return claims


def _find(cluster: Cluster, kind: str) -> list[Json] | None:
    """The objects of a kind in the namespace; None where this account may not list them."""
    try:
        return cluster.find(kind, "")
    except ForbiddenError:
        return None


def _names(items: Sequence[Json] | None) -> list[str] | None:
    return None if items is None else sorted(item["metadata"]["name"] for item in items)


# What a pod may name of a cluster, by the key of `kubernetes.data_pods` and `training_pods`.
_POD_CLASSES = {"PriorityClass": "priority_class", "RuntimeClass": "runtime_class"}


def named_classes(settings: PipelineSettings) -> list[tuple[str, str, str]]:
    """The kind, the full key and the name of each class that the pods of a pipeline name."""
    pods = {"data_pods": settings.kubernetes.data_pods, "training_pods": settings.kubernetes.training_pods}
    named = [
        (kind, f"kubernetes.{section}.{key}", getattr(placement, key))
        for kind, key in _POD_CLASSES.items()
        for section, placement in pods.items()
    ]
    return [row for row in named if row[2]]


def _secret_keys(cluster: Cluster, name: str | None) -> list[str] | None:
    """The keys of a Secret, without their values; None where this account may not read it."""
    if name is None:
        return None
    try:
        secret = cluster.read("Secret", name) or {}
    except ForbiddenError:
        return None
    return sorted(secret.get("data") or ())


def _local_queues(cluster: Cluster) -> list[str] | None:
    """The names of the queues, whichever version of Kueue's API there is; None where this account may not list them."""
    try:
        queues = [*cluster.find("LocalQueue", ""), *cluster.find("OlderLocalQueue", "")]
    except ForbiddenError:
        return None
    return sorted({queue["metadata"]["name"] for queue in queues})


def _images(pod: Json) -> str:
    return " ".join(container["image"] for container in pod["spec"]["containers"])


def _is_gaudi(pod: Json) -> bool:
    return "habana" in pod["metadata"]["name"] or "habana" in pod["metadata"].get("namespace", "")
