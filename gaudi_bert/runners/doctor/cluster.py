"""Checks of a cluster against what a pipeline asks: version, rights, cards, huge pages, MPI operator, storage, images."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.doctor.finding import Finding, fine, mend, warn
from gaudi_bert.runners.images import image_reference
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.connection import ClusterError
from gaudi_bert.runners.pod_resources import CARD_RESOURCE, EFA_RESOURCE, quantity_value

__all__ = ["ClusterAnswers", "judge", "look"]

Json = dict[str, Any]

OLDEST = (1, 24)
FAILURE_POLICY_SINCE = (1, 29)
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
# The rights that a run needs: group, resource, verb.
_RIGHTS = (
    ("batch", "jobs", "create"),
    ("batch", "jobs", "delete"),
    ("", "pods", "list"),
    ("", "pods/log", "get"),
    ("", "configmaps", "create"),
    ("", "persistentvolumeclaims", "create"),
)


@dataclass(frozen=True)
class ClusterAnswers:
    """What the API server answered; None where this account may not ask.

    Attributes:
        version: of the server.
        namespace: the namespace, or None where it is not there.
        missing_rights: what this account may not do, as `create jobs`.
        nodes: the nodes, or None.
        plugin_pods: the pods of the Gaudi device plugin, or None.
        mpi_operator: the image of the MPI operator; empty where MPIJobs are known but it is not seen; None without.
        storage_classes: the storage classes, or None.
    """

    version: tuple[int, int]
    namespace: Json | None
    missing_rights: tuple[str, ...] = ()
    nodes: Sequence[Json] | None = None
    plugin_pods: Sequence[Json] | None = None
    mpi_operator: str | None = None
    storage_classes: Sequence[Json] | None = None


def look(cluster: Cluster) -> ClusterAnswers:
    """Ask the cluster.

    Raises:
        ClusterError: it cannot be reached.
    """
    from kubernetes import client

    core, storage = client.CoreV1Api(), client.StorageV1Api()
    version = cluster.version()
    pods = _items(cluster, "list all pods", core.list_pod_for_all_namespaces)
    return ClusterAnswers(
        version=version,
        namespace=_or_none(partial(cluster.call, "read the namespace", core.read_namespace, cluster.namespace)),
        missing_rights=tuple(_missing_rights(cluster)),
        nodes=_items(cluster, "list nodes", core.list_node),
        plugin_pods=None if pods is None else [pod for pod in pods if "device-plugin" in _images(pod) and _is_gaudi(pod)],
        mpi_operator=_mpi_operator(cluster, pods),
        storage_classes=_items(cluster, "list storage classes", storage.list_storage_class),
    )


def _or_none(ask: Callable[[], Json]) -> Json | None:
    """The answer, or None where there is none for this account."""
    try:
        return ask()
    except ClusterError as error:
        if error.status in (403, 404):
            return None
        raise


def _items(cluster: Cluster, action: str, function: Callable[..., Any]) -> list[Json] | None:
    answer = _or_none(partial(cluster.call, action, function))
    return None if answer is None else answer.get("items") or []


def _missing_rights(cluster: Cluster) -> list[str]:
    from kubernetes import client

    missing = []
    for group, resource, verb in _RIGHTS:
        name, _, part = resource.partition("/")
        attributes = {"namespace": cluster.namespace, "group": group, "resource": name, "verb": verb}
        if part:
            attributes["subresource"] = part
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        function = client.AuthorizationV1Api().create_self_subject_access_review
        if not cluster.call("ask for rights", function, review).get("status", {}).get("allowed"):
            missing.append(f"{verb} {resource}")
    return missing


def _mpi_operator(cluster: Cluster, pods: Sequence[Json] | None) -> str | None:
    from kubernetes import client

    function = client.CustomObjectsApi().list_namespaced_custom_object
    place = ("kubeflow.org", "v2beta1", cluster.namespace, "mpijobs")
    if _or_none(partial(cluster.call, "list MPIJobs", function, *place)) is None:
        return None
    return next((image for pod in pods or () for image in _images(pod).split() if "mpi-operator" in image), "")


def _images(pod: Json) -> str:
    return " ".join(container["image"] for container in pod["spec"]["containers"])


def _is_gaudi(pod: Json) -> bool:
    return "habana" in pod["metadata"]["name"] or "habana" in pod["metadata"].get("namespace", "")


def judge(answers: ClusterAnswers, settings: PipelineSettings) -> list[Finding]:
    """One finding a check, in an order in which mending makes sense."""
    checks = [_version, _namespace, _rights, _storage, _images_found]
    if settings.resources.cards:
        checks += [_device_plugin, _cards, _hugepages]
    if settings.kubernetes.efa:
        checks.append(_efa)
    if settings.trains_as_mpijob:
        checks.append(_mpi)
    return [check(answers, settings) for check in checks]


def _version(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    shown = ".".join(map(str, answers.version))
    if answers.version < OLDEST:
        return mend("Kubernetes", shown, f"Indexed Jobs need {'.'.join(map(str, OLDEST))} or later: upgrade the cluster")
    if settings.kubernetes.failure_policy and answers.version < FAILURE_POLICY_SINCE:
        return mend("Kubernetes", f"{shown}, too old for podFailurePolicy", "set kubernetes.failure_policy to false")
    if not settings.kubernetes.failure_policy and answers.version >= FAILURE_POLICY_SINCE:
        return warn("Kubernetes", shown, "kubernetes.failure_policy: true makes evictions cost no retry")
    return fine("Kubernetes", shown)


def _namespace(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    name = settings.kubernetes.namespace
    if answers.namespace is None:
        return mend("namespace", f"{name} is not there, or not yours", f"kubectl create namespace {name}")
    level = answers.namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce")
    if level in ("baseline", "restricted") and settings.resources.cards:
        remedy = f"kubectl label namespace {name} pod-security.kubernetes.io/enforce=privileged --overwrite"
        return mend("namespace", f"{name} enforces pod security `{level}`, which forbids hostIPC", remedy)
    if level == "restricted" and settings.trains_as_mpijob:
        remedy = f"kubectl label namespace {name} pod-security.kubernetes.io/enforce=baseline --overwrite"
        return mend("namespace", f"{name} enforces pod security `{level}`, which forbids sshd as root", remedy)
    return fine("namespace", name)


def _rights(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    if answers.missing_rights:
        return mend("rights", f"may not {', '.join(answers.missing_rights)}", "ask for the Role in k8s/in-cluster")
    return fine("rights", "all that a run needs")


def _storage(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    kubernetes = settings.kubernetes
    if kubernetes.work_claim:
        return fine("storage", f"the claim {kubernetes.work_claim}")
    if answers.storage_classes is None:
        return warn("storage", "this account may not list storage classes", "ask which one offers the access mode")
    classes = {item["metadata"]["name"]: item for item in answers.storage_classes}
    wanted = kubernetes.storage_class or next((name for name, item in classes.items() if _is_default(item)), None)
    remedy = f"set kubernetes.storage_class to one of: {', '.join(classes) or 'none is there'}"
    if wanted not in classes:
        return mend("storage", f"no class {wanted}" if wanted else "no default storage class", remedy)
    several = (settings.trains_as_mpijob and settings.resources.workers > 1) or settings.resources.data_workers > 1
    nodes = len(answers.nodes or ())
    if several and nodes > 1 and kubernetes.access_mode == "ReadWriteOnce":
        remedy = "set kubernetes.access_mode to ReadWriteMany and kubernetes.storage_class to a class that offers it"
        return warn("storage", f"class {wanted}, ReadWriteOnce: all pods must share one of the {nodes} nodes", remedy)
    return fine("storage", f"class {wanted}, {kubernetes.access_mode}")


def _is_default(storage_class: Json) -> bool:
    return (storage_class["metadata"].get("annotations") or {}).get(DEFAULT_CLASS) == "true"


def _images_found(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    wanted = [image_reference(settings.images, name) for name in (settings.images.data, settings.images.train)]
    if settings.images.registry or any("/" in name for name in (settings.images.data, settings.images.train)):
        return fine("images", f"{', '.join(wanted)}: nodes pull them ({settings.images.pull_policy})")
    if answers.nodes is None:
        return warn("images", f"{', '.join(wanted)} have no registry", "set images.registry, or load them on every node")
    for image in wanted:
        pattern = re.compile(rf"(^|/){re.escape(image)}$")
        lacking = [node["metadata"]["name"] for node in answers.nodes if not _has_image(node, pattern)]
        if lacking:
            remedy = "push it and set images.registry, or load it on every node"
            return warn("images", f"{image} has no registry and is not seen on {', '.join(lacking[:3])}", remedy)
    return fine("images", f"{', '.join(wanted)} are on every node")


def _has_image(node: Json, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(name) for image in node["status"].get("images") or () for name in image.get("names") or ())


def _device_plugin(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    if answers.plugin_pods is None:
        return warn("device plugin", "this account may not list pods of other namespaces", "see the next line instead")
    if not answers.plugin_pods:
        return mend("device plugin", "no pod of the Gaudi device plugin", "install habana-k8s-device-plugin on the cluster")
    bad = [pod["metadata"]["name"] for pod in answers.plugin_pods if pod["status"].get("phase") != "Running"]
    if bad:
        return mend("device plugin", f"{', '.join(bad[:3])} not running", "see `kubectl logs` of that pod, and the driver")
    return fine("device plugin", f"runs on {len(answers.plugin_pods)} nodes")


def _allocatable(node: Json, name: str) -> float:
    return quantity_value(str(node["status"].get("allocatable", {}).get(name, "0")))


def _enough_nodes(answers: ClusterAnswers, workers: int, check: str, name: str, wanted: float, remedy: str) -> Finding:
    """Whether as many nodes as there are workers have `wanted` of a resource."""
    if answers.nodes is None:
        return warn(check, "this account may not list nodes", f"ask whether {workers} nodes have {wanted:g} {name}")
    amounts = [_allocatable(node, name) for node in answers.nodes]
    enough = sum(amount >= wanted for amount in amounts)
    found = f"{enough} of {len(amounts)} nodes have {wanted:g} {name} (the most is {max(amounts, default=0):g})"
    return fine(check, found) if enough >= workers else mend(check, f"{found}, {workers} needed", remedy)


def _cards(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    remedy = "set resources.cards and resources.workers to what is there, or add nodes"
    return _enough_nodes(answers, settings.resources.workers, "cards", CARD_RESOURCE, settings.resources.cards, remedy)


def _hugepages(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    wanted = quantity_value(settings.resources.hugepages_2Mi)
    remedy = "reserve them (vm.nr_hugepages) and restart the kubelet, or lower resources.hugepages_2Mi"
    return _enough_nodes(answers, settings.resources.workers, "huge pages", "hugepages-2Mi", wanted, remedy)


def _efa(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    remedy = "install the EFA device plugin, or set kubernetes.efa to 0"
    return _enough_nodes(answers, settings.resources.workers, "EFA", EFA_RESOURCE, settings.kubernetes.efa, remedy)


def _mpi(answers: ClusterAnswers, settings: PipelineSettings) -> Finding:
    if answers.mpi_operator is None:
        remedy = "install the MPI operator 0.4 or later, or set kubernetes.training to job with one worker"
        return mend("MPI operator", "kubeflow.org/v2beta1 is not served", remedy)
    if not answers.mpi_operator:
        return warn("MPI operator", "MPIJobs are known, but the operator's pod is not seen", "see that it runs")
    match = re.search(r":v?(\d+)\.(\d+)", answers.mpi_operator)
    if match and (int(match[1]), int(match[2])) < (0, 4):
        return mend("MPI operator", answers.mpi_operator, "launcherCreationPolicy needs 0.4 or later: upgrade it")
    return fine("MPI operator", answers.mpi_operator)
