"""The kinds of objects on a cluster, and what a run asks of them: the rights that its account needs.

The Role in `k8s/in-cluster/account.yaml` and the checks of `gaudi-bert doctor --cluster` are held to this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class _Kind:
    """One kind of object.

    `verbs` are what a run does with objects of this kind; empty for what only `doctor` looks at, as far as it may. The
    group of the core is empty.
    """

    name: str
    plural: str
    group: str = ""
    version: str = "v1"
    verbs: tuple[str, ...] = ()
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
    _Kind("Job", "jobs", "batch", verbs=_JOB_VERBS),
    _Kind("MPIJob", "mpijobs", "kubeflow.org", "v2beta1", verbs=_JOB_VERBS),
    _Kind("ConfigMap", "configmaps", verbs=("create", "get", "list", "update", "delete")),
    _Kind("PersistentVolumeClaim", "persistentvolumeclaims", verbs=("create", "get", "delete")),
    _Kind("NetworkPolicy", "networkpolicies", "networking.k8s.io", verbs=("create", "get", "update", "delete")),
    _Kind("ServiceAccount", "serviceaccounts", verbs=("create", "get", "delete")),
    _Kind("Workload", "workloads", "kueue.x-k8s.io", "v1beta2", verbs=("list",)),
    _Kind("OlderWorkload", "workloads", "kueue.x-k8s.io", "v1beta1", verbs=("list",)),
    _Kind("LocalQueue", "localqueues", "kueue.x-k8s.io", "v1beta2"),
    _Kind("OlderLocalQueue", "localqueues", "kueue.x-k8s.io", "v1beta1"),
    _Kind("Pod", "pods", verbs=("list",)),
    _Kind("Event", "events", verbs=("list",)),
    _Kind("Secret", "secrets"),
    _Kind("Namespace", "namespaces", namespaced=False),
    _Kind("Node", "nodes", namespaced=False),
    _Kind("PersistentVolume", "persistentvolumes", namespaced=False),
    _Kind("StorageClass", "storageclasses", "storage.k8s.io", namespaced=False),
    _Kind("LimitRange", "limitranges"),
    _Kind("ResourceQuota", "resourcequotas"),
    _Kind("PriorityClass", "priorityclasses", "scheduling.k8s.io", namespaced=False),
    _Kind("RuntimeClass", "runtimeclasses", "node.k8s.io", namespaced=False),
    _Kind("SelfSubjectAccessReview", "selfsubjectaccessreviews", "authorization.k8s.io", namespaced=False),
)
KINDS: Mapping[str, _Kind] = MappingProxyType({kind.name: kind for kind in _ROWS})


def needed_rights(*, mpijob: bool, queue: bool, network_policy: bool) -> list[Right]:
    """What an account must be allowed to do in its namespace.

    A run without an MPIJob still looks for those of others; what is submitted to a queue has Workloads that say
    why it waits.
    """
    rights = {Right(kind.group, kind.plural, verb) for kind in _ROWS for verb in kind.verbs} | {Right("", "pods/log", "get")}
    if not mpijob:
        rights = {right for right in rights if right.resource != KINDS["MPIJob"].plural or right.verb == "list"}
    unneeded = {
        KINDS[kind].plural for kind, needed in (("Workload", queue), ("NetworkPolicy", network_policy)) if not needed
    }
    return sorted(right for right in rights if right.resource not in unneeded)
