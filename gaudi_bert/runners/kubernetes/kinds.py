"""The kinds of objects that a run asks the API server about, and what it asks: the rights that its account needs.

Nothing is discovered from the server: a run knows its kinds, and an account may be allowed to see these alone. The Role in
`k8s/in-cluster/account.yaml` and the checks of `gaudi-bert doctor --cluster` are held to this list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["KINDS", "Kind", "Right", "needed_rights"]


@dataclass(frozen=True)
class Kind:
    """One kind of object.

    Attributes:
        name: as in a manifest.
        plural: as in a path of the API and in a Role.
        group: of the API; empty for the core.
        version: of the group.
        verbs: what a run asks of objects of this kind; empty for what only `doctor` looks at, as far as it may.
        log_verbs: what it asks of their logs.
        namespaced: whether objects belong to a namespace.
    """

    name: str
    plural: str
    group: str = ""
    version: str = "v1"
    verbs: tuple[str, ...] = ()
    log_verbs: tuple[str, ...] = ()
    namespaced: bool = True


@dataclass(frozen=True, order=True)
class Right:
    """One thing that an account may do in the namespace of a run."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


_JOB_VERBS = ("create", "get", "list", "watch", "delete")
_ROWS = (
    Kind("Job", "jobs", "batch", verbs=_JOB_VERBS),
    Kind("MPIJob", "mpijobs", "kubeflow.org", "v2beta1", verbs=_JOB_VERBS),
    Kind("ConfigMap", "configmaps", verbs=("create", "get", "list", "update", "delete")),
    Kind("PersistentVolumeClaim", "persistentvolumeclaims", verbs=("create", "get", "delete")),
    Kind("NetworkPolicy", "networkpolicies", "networking.k8s.io", verbs=("create", "get", "update", "delete")),
    Kind("ServiceAccount", "serviceaccounts", verbs=("create", "get", "delete")),
    Kind("Workload", "workloads", "kueue.x-k8s.io", "v1beta2", verbs=("list",)),
    Kind("OlderWorkload", "workloads", "kueue.x-k8s.io", "v1beta1", verbs=("list",)),
    Kind("LocalQueue", "localqueues", "kueue.x-k8s.io", "v1beta2"),
    Kind("OlderLocalQueue", "localqueues", "kueue.x-k8s.io", "v1beta1"),
    Kind("Pod", "pods", verbs=("list",), log_verbs=("get",)),
    Kind("Event", "events", verbs=("list",)),
    Kind("Secret", "secrets"),
    Kind("Namespace", "namespaces", namespaced=False),
    Kind("Node", "nodes", namespaced=False),
    Kind("PersistentVolume", "persistentvolumes", namespaced=False),
    Kind("StorageClass", "storageclasses", "storage.k8s.io", namespaced=False),
    Kind("SelfSubjectAccessReview", "selfsubjectaccessreviews", "authorization.k8s.io", namespaced=False),
)
KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _ROWS})


def needed_rights(*, mpijob: bool, queue: bool, network_policy: bool) -> list[Right]:
    """What an account must be allowed to do in its namespace.

    Args:
        mpijob: whether training is an MPIJob; without one, MPIJobs of other runs are still looked for.
        queue: whether what is submitted waits for a queue, which tells in Workloads why.
        network_policy: whether an MPIJob has one.
    """
    rights = {right for kind in _ROWS for right in _rights_of(kind)}
    if not mpijob:
        rights = {right for right in rights if right.resource != KINDS["MPIJob"].plural or right.verb == "list"}
    unneeded = {
        KINDS[kind].plural for kind, needed in (("Workload", queue), ("NetworkPolicy", network_policy)) if not needed
    }
    return sorted(right for right in rights if right.resource not in unneeded)


def _rights_of(kind: Kind) -> Iterator[Right]:
    yield from (Right(kind.group, kind.plural, verb) for verb in kind.verbs)
    yield from (Right(kind.group, f"{kind.plural}/log", verb) for verb in kind.log_verbs)
