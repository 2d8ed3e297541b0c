"""Find remedies for messages about objects that a cluster rejects and about pods that do not start.

The API server rejects nearly everything with the status 403 Forbidden, whether the reason is a missing permission, a quota,
a LimitRange or pod security. Only the text of the message distinguishes these reasons, so two tables map patterns of
messages to remedies.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_IMAGE = r"(?:ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|ImageInspectError): "
_NO_REGISTRY = r"no such host|dial tcp|server misbehaving|connection refused|timeout|x509"
_NO_IMAGE = r"not found|manifest unknown|denied|unauthorized|no such|invalid|couldn't parse|policy of never"
_OTHER_IMAGE = "build and push it (`make images`), or set images.registry, images.tag and images.pull_secret"
_CONTAINERS = "resources.data, resources.training, resources.waiting or resources.launcher"
_CLAIM = "or set kubernetes.work_claim to a claim that exists"
_OF_PODS, _OF_CLAIMS, _OF_OBJECTS = (
    rf".*requested: [^:]*\b(?:{names})="
    for names in (r"pods", r"requests\.storage|persistentvolumeclaims", r"count/[\w./-]+|services|configmaps|secrets")
)
# If a message from the cluster matches one of these patterns, waiting does not solve the problem. Each value is the remedy
# that the user is shown.
_HOPELESS = {
    rf"(?i){_IMAGE}(?!.*(?:{_NO_REGISTRY})).*(?:{_NO_IMAGE})": _OTHER_IMAGE,
    r"violates PodSecurity": (
        "the cluster rejects such pods: choose another kubernetes.namespace, or ask for another PodSecurity level"
    ),
    r"admission webhook .* denied the request|ValidatingAdmissionPolicy .* denied": (
        "correct the setting that the message names"
    ),
    r" cannot \w+ resource ": (
        "your account lacks this right: ask an administrator for the Role in k8s/in-cluster, or choose another "
        "kubernetes.namespace"
    ),
    r"usage per (Container|Pod) is": f"set {_CONTAINERS} to a value that the LimitRange allows",
    r"must be less than or equal to \w+ limit": (
        f"if a LimitRange sets that limit, lower the request in {_CONTAINERS}, or set cpu_limit or memory_limit there"
    ),
    r"limit to request ratio per (Container|Pod) is": (
        f"lower cpu_limit and memory_limit in {_CONTAINERS}, so that their ratio to cpu and memory is allowed"
    ),
    r"failed quota: .*must specify limits\.cpu": (
        "set cpu_limit in resources.data, resources.training, resources.waiting and resources.launcher"
    ),
    r"failed quota: .*must specify (?!limits\.cpu)": (
        "ask for a LimitRange with defaults for the resources that the message names"
    ),
    r"storage usage per PersistentVolumeClaim is": f"set kubernetes.storage to a value that the LimitRange allows, {_CLAIM}",
    r"no PriorityClass with name": "correct priority_class in kubernetes.data_pods or kubernetes.training_pods",
    r"RuntimeClass \S+ not found": "correct runtime_class in kubernetes.data_pods or kubernetes.training_pods",
    r"is being terminated": "wait until the namespace is gone and create it again, or choose another kubernetes.namespace",
    r"(?i)configmap \S+ not found": "run the same command again, which creates the ConfigMap",
    r"(?i)secret \S+ not found": "create the secret, or correct kubernetes.store_secret or images.pull_secret",
    # Kueue, the queue controller, uses the following messages for a Workload that a queue can never admit.
    r"resource ephemeral-storage unavailable in ClusterQueue": (
        "set kubernetes.request_scratch to false, or ask for ephemeral-storage in that ClusterQueue's coveredResources"
    ),
    r"resource (?!ephemeral-storage)\S+ unavailable in ClusterQueue": (
        "ask for that resource in the ClusterQueue's coveredResources, or set kubernetes.queue to another queue"
    ),
    r"^(?!.*insufficient unused quota).*insufficient quota for .*maximum capacity": (
        "lower resources.data, resources.training or resources.workers, or ask for a larger quota of the queue"
    ),
    r"(?i)(Local|Cluster)Queue \S+ doesn't exist": "set kubernetes.queue to a queue that `kubectl get localqueues` lists",
}
# If a message from the cluster matches one of these patterns, the problem may disappear without any action. Each value is
# the remedy that the user is shown.
_MAY_PASS = {
    rf"(?i){_IMAGE}.*(?:{_NO_REGISTRY})": "check images.registry, and the node's network and DNS",
    rf"(?i){_IMAGE}(?!.*(?:{_NO_REGISTRY}))": _OTHER_IMAGE,
    rf"exceeded quota{_OF_PODS}": "wait, lower resources.workers or resources.data_workers, or ask for a larger quota",
    rf"exceeded quota{_OF_CLAIMS}": f"lower kubernetes.storage, {_CLAIM}, or ask for a larger quota",
    rf"exceeded quota{_OF_OBJECTS}": "delete unused objects of that kind, or ask for a larger quota",
    rf"exceeded quota(?!{_OF_PODS}|{_OF_CLAIMS}|{_OF_OBJECTS})": (f"wait, lower {_CONTAINERS}, or ask for a larger quota"),
    r"Insufficient habana.ai/gaudi": "wait until cards are free, or lower resources.cards or resources.workers",
    r"Insufficient hugepages-2Mi": "reserve huge pages on the nodes (vm.nr_hugepages), or lower resources.hugepages_2Mi",
    r"Insufficient vpc.amazonaws.com/efa": "use nodes with EFA and its device plugin, or set kubernetes.efa to 0",
    r"Insufficient memory": "lower resources.data.memory or resources.training.memory, or add nodes",
    r"Insufficient cpu": "lower resources.data.cpu or resources.training.cpu, or add nodes",
    r"Insufficient ephemeral-storage": "lower kubernetes.scratch, or free the nodes' disks",
    r"(?i)persistentvolumeclaim(?!.*(?:usage per|exceeded quota))|storageclass|provision": (
        "set kubernetes.storage_class to a class that `kubectl get storageclass` lists, or kubernetes.work_claim to a bound "
        "claim"
    ),
    r"were unschedulable": "allow pods on a cordoned node again: `kubectl uncordon NODE`",
    r"untolerated taint": "set tolerations in kubernetes.data_pods or kubernetes.training_pods, or remove the taint",
    r"didn't match Pod's node": "correct kubernetes.node_selector, or that of kubernetes.data_pods or training_pods",
}


class Advice(NamedTuple):
    """What a user can do about a problem that the cluster reports in a message.

    Attributes:
        is_hopeless: Whether waiting cannot help.
        remedy: What to do, or "" if no pattern matches the message.
    """

    is_hopeless: bool
    remedy: str


def find_advice(cluster_message: str) -> Advice:
    """Return advice on a message from the cluster. If several remedies apply, they are joined with semicolons."""
    hopeless, may_pass = (
        [remedy for pattern, remedy in table.items() if re.search(pattern, cluster_message)]
        for table in (_HOPELESS, _MAY_PASS)
    )
    return Advice(bool(hopeless), "; ".join(hopeless or may_pass))
