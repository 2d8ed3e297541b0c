"""What a cluster answers about its version, rights, nodes and storage; nothing is judged here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.connection import ClusterError
from gaudi_bert.runners.kubernetes.kinds import needed_rights
from gaudi_bert.runners.kubernetes.pods import work_claim_name

__all__ = ["ClusterAnswers", "ask_cluster"]

Json = dict[str, Any]


@dataclass(frozen=True)
class ClusterAnswers:
    """What the API server answered; None where this account may not ask.

    Attributes:
        version: of the server.
        namespace: the namespace; None where it is not there, or where this account may not look at it.
        namespace_is_hidden: whether this account may not look at it.
        missing_rights: what this account may not do, as `create jobs`.
        claims: the volume claims that the pipeline uses and that are there, by name.
        nodes: the nodes.
        plugin_pods: the pods of the Gaudi device plugin.
        serves_mpijobs: whether the API server knows MPIJobs.
        mpi_operator: the image of the MPI operator; None where it is not seen.
        storage_classes: the storage classes.
        volumes: the PersistentVolumes.
        local_queues: the names of Kueue's queues in the namespace.
        secret_keys: the names of what is in the Secret `kubernetes.store_secret`, never its values.
    """

    version: tuple[int, int]
    namespace: Json | None
    namespace_is_hidden: bool = False
    missing_rights: tuple[str, ...] = ()
    claims: dict[str, Json] = field(default_factory=dict)
    nodes: Sequence[Json] | None = None
    plugin_pods: Sequence[Json] | None = None
    serves_mpijobs: bool | None = None
    mpi_operator: str | None = None
    storage_classes: Sequence[Json] | None = None
    volumes: Sequence[Json] | None = None
    local_queues: Sequence[str] | None = None
    secret_keys: Sequence[str] | None = None


def ask_cluster(cluster: Cluster, settings: PipelineSettings) -> ClusterAnswers:
    """Ask the cluster for all that matters to `settings`.

    Raises:
        ClusterError: it cannot be reached.
    """
    version = cluster.version()
    namespace, is_hidden = _namespace(cluster)
    pods = cluster.find_everywhere("Pod")
    plugin_pods = None if pods is None else [pod for pod in pods if "device-plugin" in _images(pod) and _is_gaudi(pod)]
    rights = needed_rights(
        mpijob=settings.trains_as_mpijob,
        queue=settings.kubernetes.queue is not None,
        network_policy=settings.has_network_policy,
    )
    return ClusterAnswers(
        version=version,
        namespace=namespace,
        namespace_is_hidden=is_hidden,
        missing_rights=tuple(str(right) for right in rights if not cluster.is_allowed(right)),
        claims=_claims(cluster, settings),
        nodes=cluster.find_everywhere("Node"),
        plugin_pods=plugin_pods,
        serves_mpijobs=cluster.serves("MPIJob"),
        mpi_operator=next((image for pod in pods or () for image in _images(pod).split() if "mpi-operator" in image), None),
        storage_classes=cluster.find_everywhere("StorageClass"),
        volumes=cluster.find_everywhere("PersistentVolume"),
        local_queues=_local_queues(cluster) if settings.kubernetes.queue else None,
        secret_keys=_secret_keys(cluster, settings.kubernetes.store_secret),
    )


def _namespace(cluster: Cluster) -> tuple[Json | None, bool]:
    """The namespace, and whether this account may not look at it."""
    try:
        return cluster.read_namespace(), False
    except ClusterError as error:
        if error.status in (403, 404):
            return None, error.status == 403
        raise


def _claims(cluster: Cluster, settings: PipelineSettings) -> dict[str, Json]:
    found = {}
    for name in filter(None, (work_claim_name(settings), settings.kubernetes.data_claim)):
        try:
            claim = cluster.read("PersistentVolumeClaim", name)
        except ClusterError as error:
            if error.status != 403:
                raise
            continue  # The missing right is told by itself.
        if claim is not None:
            found[name] = claim
    return found


def _secret_keys(cluster: Cluster, name: str | None) -> list[str] | None:
    """What a Secret has, without what it says; None where this account may not read it."""
    if name is None:
        return None
    try:
        secret = cluster.read("Secret", name) or {}
    except ClusterError as error:
        if error.status != 403:
            raise
        return None
    return sorted(secret.get("data") or ())


def _local_queues(cluster: Cluster) -> list[str] | None:
    """The names of the queues, whichever version of Kueue's API there is; None where this account may not list them."""
    try:
        found = [*cluster.find("LocalQueue", ""), *cluster.find("OlderLocalQueue", "")]
    except ClusterError as error:
        if error.status != 403:
            raise
        return None
    return sorted({queue["metadata"]["name"] for queue in found})


def _images(pod: Json) -> str:
    return " ".join(container["image"] for container in pod["spec"]["containers"])


def _is_gaudi(pod: Json) -> bool:
    return "habana" in pod["metadata"]["name"] or "habana" in pod["metadata"].get("namespace", "")
