"""What a cluster answers about its version, rights, nodes and storage, and what that means for a pipeline.

Room on nodes and in the namespace is in `room.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.doctor.checks import CheckResult, ClusterAnswers, failed, passed, warning
from gaudi_bert.runners.doctor.room import check_limits, check_nodes
from gaudi_bert.runners.kubernetes.claims import (
    ALONE,
    SHARED,
    find_class,
    has_several_workers,
    shares_volumes,
    sharing_remedy,
)
from gaudi_bert.runners.kubernetes.client import KINDS, Cluster, Connection, ForbiddenError, Json, NotFoundError
from gaudi_bert.runners.kubernetes.manifests import FAILURE_POLICY_SINCE
from gaudi_bert.runners.kubernetes.pods import work_claim_name
from gaudi_bert.runners.kubernetes.run import OPERATOR_REMEDIES
from gaudi_bert.runners.stage_table import STAGES, quantity_value, stage_image, stages_of

_OLDEST = (1, 24)


def examine_cluster(settings: PipelineSettings, reporter: Reporter) -> list[CheckResult]:
    """What is right and wrong with the cluster that the kubeconfig file names."""
    cluster = Cluster(settings.kubernetes.namespace, Connection(say=reporter.say))
    return _check_cluster(_ask_cluster(cluster, settings), settings)


# --- what is asked


def _ask_cluster(cluster: Cluster, settings: PipelineSettings) -> ClusterAnswers:
    """Ask the cluster for all that matters to `settings`."""
    version = cluster.version()
    namespace, is_hidden = _ask_namespace(cluster)
    pods = cluster.find_everywhere("Pod")
    plugin_pods = None if pods is None else [pod for pod in pods if "device-plugin" in _images(pod) and _is_gaudi(pod)]
    rights = _needed_rights(
        training="nodes" if settings.needs_service else settings.training_kind,
        queue=settings.kubernetes.queue is not None,
        network_policy=settings.has_network_policy,
    )
    return ClusterAnswers(
        version=version,
        namespace=namespace,
        namespace_is_hidden=is_hidden,
        pods_are_hidden=pods is None,
        missing_rights=tuple(str(right) for right in rights if not cluster.is_allowed(*right)),
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
        pod_classes={
            kind: _names(cluster.find_everywhere(kind)) for kind in {kind for kind, *_ in _named_classes(settings)}
        },
    )


class _Right(NamedTuple):
    """One thing that an account may do in the namespace of a run."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


def _needed_rights(*, training: str, queue: bool, network_policy: bool) -> list[_Right]:
    """What an account must be allowed to do in its namespace; `training` is `job`, `nodes`, `mpijob` or `trainjob`.

    A run without an MPIJob still looks for those of others; what is submitted to a queue has Workloads that say
    why it waits.
    """
    rights = {_Right(kind.group, kind.plural, verb) for kind in KINDS.values() for verb in kind.verbs} | {
        _Right("", "pods/log", "get")
    }
    if training != "mpijob":
        rights = {right for right in rights if right.resource != KINDS["MPIJob"].plural or right.verb == "list"}
    optional = {
        "Workload": queue,
        "NetworkPolicy": network_policy,
        "Service": training == "nodes",
        "TrainJob": training == "trainjob",
        "TrainingRuntime": training == "trainjob",
    }
    unneeded = {KINDS[kind].plural for kind, needed in optional.items() if not needed}
    return sorted(right for right in rights if right.resource not in unneeded)


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


def _named_classes(settings: PipelineSettings) -> list[tuple[str, str, str]]:
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
    queues = [_find(cluster, "LocalQueue"), _find(cluster, "OlderLocalQueue")]
    return None if None in queues else sorted({queue["metadata"]["name"] for each in queues for queue in each or ()})


def _images(pod: Json) -> str:
    return " ".join(container["image"] for container in pod["spec"]["containers"])


def _is_gaudi(pod: Json) -> bool:
    return "habana" in pod["metadata"]["name"] or "habana" in pod["metadata"].get("namespace", "")


# --- what the answers mean


def _check_cluster(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One result per check, in an order in which fixing makes sense."""
    checks = [_version, _namespace, _rights, _check_storage, _images_on_nodes]
    if settings.resources.cards:
        checks.append(_device_plugin)
    if settings.trains_as_mpijob:
        checks.append(_mpi)
    if settings.training_kind == "trainjob":
        checks.append(_trainer)
    if settings.kubernetes.queue:
        checks.append(_queue)
    if settings.kubernetes.store_secret:
        checks.append(_secret)
    results = [check(answers, settings) for check in checks] + _pod_classes(answers, settings)
    return results + check_limits(answers, settings) + check_nodes(answers, settings)


def _version(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    shown = ".".join(map(str, answers.version))
    if answers.version < _OLDEST:
        return failed("Kubernetes", shown, f"Indexed Jobs need {'.'.join(map(str, _OLDEST))} or later: upgrade the cluster")
    if answers.version < settings.kubernetes.version_numbers:
        finding = f"{shown}, older than kubernetes.version: {settings.kubernetes.version}"
        return failed("Kubernetes", finding, f"set kubernetes.version to '{shown}'")
    policy = settings.kubernetes.failure_policy
    if policy is True and answers.version < FAILURE_POLICY_SINCE:
        return failed("Kubernetes", f"{shown}, too old for podFailurePolicy", "set kubernetes.failure_policy to auto")
    if policy is False and answers.version >= FAILURE_POLICY_SINCE:
        return warning("Kubernetes", shown, "kubernetes.failure_policy: auto makes evictions cost no retry")
    return passed("Kubernetes", shown)


def _namespace(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    name = settings.kubernetes.namespace
    if answers.namespace_is_hidden:
        remedy = "ask which level of pod security it enforces; Gaudi needs `privileged`"
        return warning("namespace", f"this account may not look at {name} itself", remedy)
    if answers.namespace is None:
        return failed("namespace", f"{name} does not exist", f"kubectl create namespace {name}")
    level = answers.namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce")
    if level in ("baseline", "restricted") and settings.resources.cards:
        remedy = f"kubectl label namespace {name} pod-security.kubernetes.io/enforce=privileged --overwrite"
        return failed("namespace", f"{name} enforces pod security `{level}`, which forbids hostIPC", remedy)
    return passed("namespace", name)


def _rights(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.missing_rights:
        return failed("rights", f"may not {', '.join(answers.missing_rights)}", "ask for the Role in k8s/in-cluster")
    return passed("rights", "all that a run needs")


def _images_on_nodes(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    images = list(dict.fromkeys(stage_image(settings, STAGES[stage]) for stage in stages_of(settings)))
    if settings.images.registry or any("/" in image for image in images):
        return passed("images", f"{', '.join(images)}: nodes pull them ({settings.images.pull_policy})")
    if answers.nodes is None:
        return warning("images", f"{', '.join(images)} have no registry", "set images.registry, or load them on every node")
    for image in images:
        pattern = re.compile(rf"(^|/){re.escape(image)}$")
        lacking = [node["metadata"]["name"] for node in answers.nodes if not _has_image(node, pattern)]
        if lacking:
            remedy = "push it and set images.registry, or load it on every node"
            return warning("images", f"{image} has no registry and is not seen on {', '.join(lacking[:3])}", remedy)
    return passed("images", f"{', '.join(images)} are on every node")


def _has_image(node: Json, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(name) for image in node["status"].get("images") or () for name in image.get("names") or ())


def _device_plugin(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.plugin_pods is None:
        return warning("device plugin", "this account may not list pods of other namespaces", "see the next line instead")
    if not answers.plugin_pods:
        return failed(
            "device plugin", "no pod of the Gaudi device plugin", "install habana-k8s-device-plugin on the cluster"
        )
    bad = [pod["metadata"]["name"] for pod in answers.plugin_pods if pod["status"].get("phase") != "Running"]
    if bad:
        return failed("device plugin", f"{', '.join(bad[:3])} not running", "see `kubectl logs` of that pod, and the driver")
    return passed("device plugin", f"runs on {len(answers.plugin_pods)} nodes")


def _mpi(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.serves_mpijobs is False:
        return failed("MPI operator", "kubeflow.org/v2beta1 is not served", OPERATOR_REMEDIES["MPIJob"])
    if not answers.mpi_operator and answers.pods_are_hidden:
        known = "MPIJobs are known, but the operator's pod" if answers.serves_mpijobs else "the operator"
        return warning("MPI operator", f"{known} is not seen by this account", "ask whether it runs")
    if not answers.mpi_operator:
        finding = "MPIJobs are known, but no pod of the cluster has the operator's image"
        return warning("MPI operator", finding, "see `kubectl get pods -A`: nothing starts an MPIJob without the operator")
    match = re.search(r":v?(\d+)\.(\d+)", answers.mpi_operator)
    oldest, why = ((0, 8), "Kueue") if settings.kubernetes.queue else ((0, 4), "launcherCreationPolicy")
    if match and (int(match[1]), int(match[2])) < oldest:
        needed = ".".join(map(str, oldest))
        return failed("MPI operator", answers.mpi_operator, f"{why} needs {needed} or later: upgrade it")
    return passed("MPI operator", answers.mpi_operator)


def _trainer(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    name = "Kubeflow Trainer"
    if answers.serves_trainjobs is None:
        return warning(name, "this account may not list trainjobs", "ask whether Kubeflow Trainer is installed")
    if not answers.serves_trainjobs:
        return failed(name, "trainer.kubeflow.org/v1alpha1 is not served", OPERATOR_REMEDIES["TrainJob"])
    return passed(name, "trainer.kubeflow.org/v1alpha1 is served")


def _pod_classes(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One check for each class that pods name: the API refuses a pod whose class does not exist."""
    checks = []
    for kind, key, name in _named_classes(settings):
        existing = answers.pod_classes.get(kind)
        if existing is None:
            check = warning(kind, f"this account may not list the classes ({key} is {name})", f"ask whether {name} exists")
        elif name not in existing:
            check = failed(kind, f"no {kind} {name}", f"set {key} to one of: {', '.join(existing) or 'there are none'}")
        else:
            check = passed(kind, name)
        checks.append(check)
    return checks


def _queue(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    name = str(settings.kubernetes.queue)
    if answers.local_queues is None:
        return warning("queue", "this account may not list localqueues", f"ask whether there is one called {name}")
    if name not in answers.local_queues:
        others = f"there are {', '.join(answers.local_queues)}" if answers.local_queues else "there is none at all"
        return failed("queue", f"no LocalQueue {name}, {others}", "correct kubernetes.queue, or ask who runs the cluster")
    return passed("queue", name)


def _secret(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    """The Secret with the store's credentials must exist, and have what the store's library reads."""
    name, namespace = settings.kubernetes.store_secret, settings.kubernetes.namespace
    if answers.secret_keys is None:
        remedy = f"ask whether there is one called {name}; pods need it, a run does not read it"
        return warning("store secret", "this account may not get secrets", remedy)
    if not answers.secret_keys:
        remedy = (
            f"kubectl -n {namespace} create secret generic {name} --from-literal=NAME=VALUE ..., or correct store_secret"
        )
        return failed("store secret", f"no Secret {name}, or an empty one", remedy)
    return passed("store secret", f"{name}: {', '.join(answers.secret_keys)}")


# --- storage classes and volumes

# The provisioner of a class whose volumes are created by hand.
_NO_PROVISIONER = "kubernetes.io/no-provisioner"


def _check_storage(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    """The claims that are named must exist; a new one must find a class or a volume."""
    kubernetes = settings.kubernetes
    for key, name in (("work_claim", kubernetes.work_claim), ("data_claim", kubernetes.data_claim)):
        if name and name not in answers.claims and "get persistentvolumeclaims" not in answers.missing_rights:
            remedy = f"set kubernetes.{key} to one of `kubectl get pvc -n {kubernetes.namespace}`"
            return failed("storage", f"no claim {name}", remedy)
    if kubernetes.store:
        return _check_scratch(settings)
    name = work_claim_name(settings)
    claim = answers.claims.get(name)
    if claim is None and kubernetes.work_claim:
        return passed("storage", f"the claim {name}")  # this account may not look at it
    if claim is None:
        return _check_new_claim(answers, settings)
    if claim.get("status", {}).get("phase") == "Lost":
        return failed("storage", f"the claim {name} has lost its volume", "remove it: gaudi-bert k8s delete PIPELINE --data")
    spec = claim.get("spec", {})
    modes = spec.get("accessModes") or [kubernetes.access_mode]
    remedy = sharing_remedy(settings, exists=True)
    if kubernetes.access_mode == SHARED and SHARED not in modes:
        finding = f"the claim {name}, {', '.join(modes)}: kubernetes.access_mode is {SHARED}, and a claim cannot be changed"
        return failed("storage", finding, f"{remedy}; or set kubernetes.access_mode to {ALONE}")
    storage_class = find_class(answers.storage_classes or (), spec.get("storageClassName"))
    return _check_access_modes(answers, settings, f"the claim {name}", modes, remedy, storage_class)


def _check_scratch(settings: PipelineSettings) -> CheckResult:
    """Two groups and some shards must find room in a pod's scratch."""
    scratch, group = quantity_value(settings.kubernetes.scratch), settings.packing.group_bytes
    finding = f"{settings.kubernetes.store}, scratch of {settings.kubernetes.scratch}"
    if scratch < 3 * group:
        remedy = "where the records are larger than that, set kubernetes.scratch to three times packing.group_bytes"
        return warning("storage", f"{finding}, a group may have {group / 2**30:.1f} GiB", remedy)
    return passed("storage", finding)


def _check_new_claim(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.storage_classes is None:
        return warning("storage", "this account may not list storage classes", "ask which one offers the access mode")
    chosen = find_class(answers.storage_classes, settings.kubernetes.storage_class)
    storage_class = chosen["metadata"]["name"] if chosen is not None else settings.kubernetes.storage_class
    mode, remedy = settings.kubernetes.access_mode, sharing_remedy(settings, exists=False)
    if chosen is not None and chosen.get("provisioner") != _NO_PROVISIONER:
        return _check_access_modes(answers, settings, f"class {storage_class}", [mode], remedy, chosen)
    missing = f"no class {storage_class}" if storage_class else "no default storage class"
    if chosen is not None:
        missing = f"class {storage_class} provisions nothing"
    if answers.volumes is None:
        by_hand = "ask whether there is a volume of that size and access mode without claim"
        return warning("storage", f"{missing}, and this account may not list volumes", by_hand)
    volume, reason = _volume_for_claim(answers.volumes, storage_class or "", settings)
    if volume is not None:
        return _check_access_modes(answers, settings, f"volume {volume['metadata']['name']}", [mode], remedy)
    able = [item["metadata"]["name"] for item in answers.storage_classes if item.get("provisioner") != _NO_PROVISIONER]
    return failed(
        "storage",
        f"{missing}, and {reason}",
        f"set kubernetes.storage_class to one of: {', '.join(able) or 'there is none'}",
    )


def _check_access_modes(
    answers: ClusterAnswers,
    settings: PipelineSettings,
    finding: str,
    modes: Sequence[str],
    remedy: str,
    storage_class: Json | None = None,
) -> CheckResult:
    """Several pods on several nodes need a volume that all of them can mount."""
    workers, nodes, shown = settings.resources.workers, len(answers.nodes or ()), ", ".join(modes)
    if nodes < 2 or SHARED in modes or shares_volumes(storage_class):
        return passed("storage", f"{finding}, {shown}")
    if has_several_workers(settings):
        return failed("storage", f"{finding}, {shown}: {workers} workers may run on several of the {nodes} nodes", remedy)
    if settings.resources.data_workers > 1:
        return warning("storage", f"{finding}, {shown}: all pods must share one of the {nodes} nodes", remedy)
    return passed("storage", f"{finding}, {shown}")


def _volume_for_claim(volumes: Sequence[Json], storage_class: str, settings: PipelineSettings) -> tuple[Json | None, str]:
    """The volume, created by hand, that the claim of the work folder would be bound to; or why there is none."""
    size, mode = settings.kubernetes.storage, settings.kubernetes.access_mode
    free = [
        volume
        for volume in volumes
        if volume.get("status", {}).get("phase") == "Available"
        and (volume["spec"].get("storageClassName") or "") == storage_class
    ]
    if not free:
        return None, f"no free volume{f' of class {storage_class}' if storage_class else ''}"
    large = [item for item in free if quantity_value(item["spec"]["capacity"]["storage"]) >= quantity_value(size)]
    if not large:
        most = max((item["spec"]["capacity"]["storage"] for item in free), key=quantity_value)
        return None, f"no free volume of {size}: the largest has {most}"
    offering = [item for item in large if mode in (item["spec"].get("accessModes") or ())]
    if not offering:
        offered = ", ".join(sorted({name for item in large for name in item["spec"].get("accessModes") or ()}))
        return None, f"no free volume of {size} offers {mode}: they offer {offered or 'nothing'}"
    return offering[0], ""
