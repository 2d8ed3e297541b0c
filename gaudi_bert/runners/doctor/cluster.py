"""What a cluster answers about its version, rights, nodes and storage, and what that means for a pipeline."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gaudi_bert.artefacts.store.location import scheme_of
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodPlacement
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning
from gaudi_bert.runners.kubernetes.client import Cluster, ForbiddenError, NotFoundError, needed_rights
from gaudi_bert.runners.kubernetes.jobs import training_placement, work_claim_name
from gaudi_bert.runners.kubernetes.manifests import FAILURE_POLICY_SINCE
from gaudi_bert.runners.requirements import (
    CARD_RESOURCE,
    EFA_RESOURCE,
    HUGE_PAGES,
    STORE_TOOLS,
    image_reference,
    pod_resources,
    quantity_text,
    quantity_value,
    training_resources,
)

Json = dict[str, Any]


@dataclass(frozen=True)
class ClusterAnswers:
    """What the API server answered; None where this account may not ask.

    `namespace` is None where it does not exist, too. Missing rights read as `create jobs`; `claims` are those that the
    pipeline uses and that exist, `mpi_operator` is that pod's image, `local_queues` are Kueue's in the namespace, and
    `secret_keys` the names of what is in `kubernetes.store_secret`, never its values.
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
    """Ask the cluster for all that matters to `settings`."""
    version = cluster.version()
    namespace, is_hidden = _ask_namespace(cluster)
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


def _secret_keys(cluster: Cluster, name: str | None) -> list[str] | None:
    """What a Secret has, without what it says; None where this account may not read it."""
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


# --- checks

_OLDEST = (1, 24)


def examine_cluster(settings: PipelineSettings) -> list[CheckResult]:
    """What is right and wrong with the cluster that the kubeconfig file names."""
    return check_cluster(ask_cluster(Cluster(settings.kubernetes.namespace), settings), settings)


def check_cluster(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One result per check, in an order in which fixing makes sense."""
    checks = [_version, _namespace, _rights, _storage, _images_on_nodes]
    if settings.resources.cards:
        checks.append(_device_plugin)
    if settings.trains_as_mpijob:
        checks.append(_mpi)
    if settings.kubernetes.queue:
        checks.append(_queue)
    if settings.kubernetes.store_secret:
        checks.append(_secret)
    return [check(answers, settings) for check in checks] + _nodes(answers, settings)


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
    images = [image_reference(settings.images, name) for name in (settings.images.data, settings.images.train)]
    if settings.images.registry or any("/" in name for name in (settings.images.data, settings.images.train)):
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
        remedy = "install the MPI operator 0.4 or later, or set kubernetes.training to job with one worker"
        return failed("MPI operator", "kubeflow.org/v2beta1 is not served", remedy)
    if not answers.mpi_operator:
        known = "MPIJobs are known, but the operator's pod" if answers.serves_mpijobs else "the operator"
        return warning("MPI operator", f"{known} is not seen by this account", "ask whether it runs")
    match = re.search(r":v?(\d+)\.(\d+)", answers.mpi_operator)
    oldest, why = ((0, 8), "Kueue") if settings.kubernetes.queue else ((0, 4), "launcherCreationPolicy")
    if match and (int(match[1]), int(match[2])) < oldest:
        needed = ".".join(map(str, oldest))
        return failed("MPI operator", answers.mpi_operator, f"{why} needs {needed} or later: upgrade it")
    return passed("MPI operator", answers.mpi_operator)


def _queue(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    name = str(settings.kubernetes.queue)
    if answers.local_queues is None:
        return warning("queue", "this account may not list localqueues", f"ask whether there is one called {name}")
    if name not in answers.local_queues:
        others = f"there are {', '.join(answers.local_queues)}" if answers.local_queues else "there is none at all"
        return failed("queue", f"no LocalQueue {name}, {others}", "correct kubernetes.queue, or ask who runs the cluster")
    return passed("queue", name)


# --- room on the nodes: cores, memory, cards, huge pages, EFA devices

# What a check of one resource is called, and the remedy where there is too little of it.
_RESOURCES = {
    "cpu": ("cpu", "lower resources.{part}.cpu, or add nodes"),
    "memory": ("memory", "lower resources.{part}.memory, or add nodes"),
    CARD_RESOURCE: ("cards", "set resources.cards and resources.workers to what is there, or add nodes"),
    HUGE_PAGES: (
        "huge pages",
        "reserve them (vm.nr_hugepages) and restart the kubelet, or lower resources.hugepages_2Mi",
    ),
    EFA_RESOURCE: ("EFA", "install the EFA device plugin, or set kubernetes.efa to 0"),
}


def _nodes(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One check for data pods, and one for each resource that training workers ask for."""
    training = training_resources(settings)["requests"]
    data = pod_resources(settings.resources.data)["requests"]
    if answers.nodes is None:
        finding = f"this account may not list nodes; a training worker asks for {_text(training)}"
        return [warning("nodes", finding, f"ask whether {settings.resources.workers} of them fit")]
    usable = [node for node in answers.nodes if _is_usable(node, settings.kubernetes.data_pods)]
    for_training = [node for node in answers.nodes if _is_usable(node, training_placement(settings))]
    checks = [_data_check(usable, data, settings)]
    checks += [_training_check(for_training, name, amount, settings) for name, amount in training.items()]
    if all(check.verdict == "ok" for check in checks):
        checks += _together_check(for_training, training, settings)
    return checks


def _is_usable(node: Json, placement: PodPlacement) -> bool:
    """Whether pods of ours are put on `node` at all."""
    spec, labels = node.get("spec") or {}, node["metadata"].get("labels") or {}
    taints = [taint for taint in spec.get("taints") or () if taint["effect"] in ("NoSchedule", "NoExecute")]
    tolerated = all(any(one.tolerates(taint) for one in placement.tolerations) for taint in taints)
    return not spec.get("unschedulable") and tolerated and placement.node_selector.items() <= labels.items()


def _fitting(node: Json, request: Mapping[str, str]) -> int:
    """How many pods that each ask for `request` fit on an empty `node`."""
    allocatable = node["status"].get("allocatable", {})
    # 2 cores are 20 times 100m, however floating point rounds it.
    return min(
        int(quantity_value(str(allocatable.get(name, "0"))) / quantity_value(amount) + 1e-9)
        for name, amount in request.items()
        if quantity_value(amount)
    )


def _data_check(nodes: Sequence[Json], request: Mapping[str, str], settings: PipelineSettings) -> CheckResult:
    pods, shown = settings.resources.data_workers, _text(request)
    fitting = sum(_fitting(node, request) for node in nodes)
    if not fitting:
        most = ", ".join(quantity_text(name, quantity_value(_most(nodes, name))) for name in request)
        remedy = "lower resources.data.cpu and resources.data.memory, or add nodes"
        return failed("data pods", f"no node has room for one of {shown} (the most is {most})", remedy)
    if fitting < pods:
        remedy = f"set resources.data_workers to {fitting}, or add nodes"
        return warning("data pods", f"{fitting} of {pods} pods of {shown} fit at a time", remedy)
    return passed("data pods", f"{pods} of {shown} fit")


def _training_check(nodes: Sequence[Json], name: str, amount: str, settings: PipelineSettings) -> CheckResult:
    workers = settings.resources.workers
    check, remedy = _RESOURCES[name]
    fitting = sum(_fitting(node, {name: amount}) for node in nodes)
    most = quantity_text(name, quantity_value(_most(nodes, name)))
    finding = (
        f"{min(fitting, workers)} of {workers} training workers with {amount} {name} fit (the most of a node is {most})"
    )
    return passed(check, finding) if fitting >= workers else failed(check, finding, remedy.format(part="training"))


def _together_check(nodes: Sequence[Json], request: Mapping[str, str], settings: PipelineSettings) -> list[CheckResult]:
    """Whether the nodes that have enough of one resource have enough of the others, too; nothing where they have."""
    workers, fitting = settings.resources.workers, sum(_fitting(node, request) for node in nodes)
    if fitting >= workers:
        return []
    finding = f"{fitting} of {workers} training workers fit that ask for {_text(request)} together"
    return [failed("room", finding, "lower what one of them asks for, or add nodes that have all of it")]


def _most(nodes: Sequence[Json], name: str) -> str:
    amounts = [str(node["status"].get("allocatable", {}).get(name, "0")) for node in nodes]
    return max(amounts, key=quantity_value, default="0")


def _text(request: Mapping[str, str]) -> str:
    return ", ".join(f"{amount} {name}" for name, amount in request.items())


# --- storage: an existing claim, a storage class, or a volume made by hand; or an object store

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
# The provisioner of a class whose volumes are made by hand.
_NO_PROVISIONER = "kubernetes.io/no-provisioner"


def _storage(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
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
    modes = claim.get("spec", {}).get("accessModes") or [kubernetes.access_mode]
    remedy = "set kubernetes.work_claim to a claim that offers ReadWriteMany"
    if not kubernetes.work_claim:
        remedy = "set kubernetes.access_mode to ReadWriteMany, and have it made anew: gaudi-bert k8s delete PIPELINE --data"
    return _check_access_modes(answers, settings, f"the claim {name}", modes, remedy)


def _check_scratch(settings: PipelineSettings) -> CheckResult:
    """Two groups and some shards must find room in a pod's scratch."""
    scratch, group = quantity_value(settings.kubernetes.scratch), settings.packing.group_bytes
    finding = f"{settings.kubernetes.store}, scratch of {settings.kubernetes.scratch}"
    if scratch < 3 * group:
        remedy = "where the records are larger than that, set kubernetes.scratch to three times packing.group_bytes"
        return warning("storage", f"{finding}, a group may have {group / 2**30:.1f} GiB", remedy)
    return passed("storage", finding)


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
    tools = STORE_TOOLS.get(scheme_of(settings.kubernetes.store or ""))
    if tools and not any(key.startswith(tools.prefixes) for key in answers.secret_keys):
        names = f"it has {', '.join(answers.secret_keys)}, none of them {'* or '.join(tools.prefixes)}*"
        return warning("store secret", f"{name}: {names}", "name its keys as the store's own variables are called")
    return passed("store secret", f"{name}: {', '.join(answers.secret_keys)}")


def _check_new_claim(answers: ClusterAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.storage_classes is None:
        return warning("storage", "this account may not list storage classes", "ask which one offers the access mode")
    classes = {item["metadata"]["name"]: item for item in answers.storage_classes}
    storage_class = settings.kubernetes.storage_class or next(
        (name for name, item in classes.items() if _is_default(item)), None
    )
    mode = settings.kubernetes.access_mode
    remedy = "set kubernetes.access_mode to ReadWriteMany and kubernetes.storage_class to a class that offers it"
    found = classes.get(str(storage_class))
    if found is not None and found.get("provisioner") != _NO_PROVISIONER:
        return _check_access_modes(answers, settings, f"class {storage_class}", [mode], remedy)
    missing = f"no class {storage_class}" if storage_class else "no default storage class"
    if found is not None:
        missing = f"class {storage_class} provisions nothing"
    if answers.volumes is None:
        by_hand = "ask whether there is a volume of that size and access mode without claim"
        return warning("storage", f"{missing}, and this account may not list volumes", by_hand)
    volume, reason = _volume_for_claim(answers.volumes, storage_class or "", settings)
    if volume is not None:
        return _check_access_modes(answers, settings, f"volume {volume['metadata']['name']}", [mode], remedy)
    able = [name for name, item in classes.items() if item.get("provisioner") != _NO_PROVISIONER]
    return failed(
        "storage",
        f"{missing}, and {reason}",
        f"set kubernetes.storage_class to one of: {', '.join(able) or 'there is none'}",
    )


def _check_access_modes(
    answers: ClusterAnswers, settings: PipelineSettings, finding: str, modes: Sequence[str], remedy: str
) -> CheckResult:
    """Several pods on several nodes need a volume that all of them can mount."""
    several = (settings.trains_as_mpijob and settings.resources.workers > 1) or settings.resources.data_workers > 1
    nodes, shown = len(answers.nodes or ()), ", ".join(modes)
    if several and nodes > 1 and "ReadWriteMany" not in modes:
        return warning("storage", f"{finding}, {shown}: all pods must share one of the {nodes} nodes", remedy)
    return passed("storage", f"{finding}, {shown}")


def _is_default(storage_class: Json) -> bool:
    return (storage_class["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"


def _volume_for_claim(volumes: Sequence[Json], storage_class: str, settings: PipelineSettings) -> tuple[Json | None, str]:
    """The volume, made by hand, that the claim of the work folder would be bound to; or why there is none."""
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
