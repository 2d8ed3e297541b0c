"""Whether a cluster has room for a pipeline: on the nodes that take its pods, and within the limits of its namespace.

Of nodes: cores, memory, disk, cards, huge pages, EFA devices. Of the namespace: its LimitRanges and ResourceQuotas, which
admit the pods and the volume, or do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodPlacement
from gaudi_bert.runners.doctor.checks import CheckResult, ClusterAnswers, failed, passed, warning
from gaudi_bert.runners.kubernetes.client import Json
from gaudi_bert.runners.kubernetes.manifests import Manifests, render
from gaudi_bert.runners.kubernetes.pods import Manifest, training_placement
from gaudi_bert.runners.kubernetes.reasons import expected_pods, needs_all_pods
from gaudi_bert.runners.stage_table import (
    CARD_RESOURCE,
    EFA_RESOURCE,
    HUGE_PAGES,
    STEPS,
    pod_resources,
    quantity_text,
    quantity_value,
    training_resources,
)

_SCRATCH = "ephemeral-storage"
# What a check of one resource is called, and the remedy where there is too little of it.
_RESOURCES = {
    "cpu": ("cpu", "lower resources.{part}.cpu, or add nodes"),
    "memory": ("memory", "lower resources.{part}.memory, or add nodes"),
    CARD_RESOURCE: ("cards", "set resources.cards and resources.workers to what is there, or add nodes"),
    HUGE_PAGES: (
        "huge pages",
        "reserve them (vm.nr_hugepages) and restart the kubelet, or lower resources.hugepages_2Mi",
    ),
    _SCRATCH: ("scratch", "lower kubernetes.scratch, or free the nodes' disks"),
    EFA_RESOURCE: ("EFA", "install the EFA device plugin, or set kubernetes.efa to 0"),
}


def check_nodes(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One check for data pods, and one for each resource that training workers ask for."""
    tells_disk = any(_SCRATCH in node["status"].get("allocatable", {}) for node in answers.nodes or ())
    scratch = {_SCRATCH: settings.kubernetes.scratch} if tells_disk else {}
    training = training_resources(settings)["requests"] | scratch
    data = pod_resources(settings.resources.data)["requests"] | scratch
    if answers.nodes is None:
        finding = f"this account may not list nodes; a training worker asks for {_text(training)}"
        return [warning("nodes", finding, f"ask whether {settings.resources.workers} of them fit")]
    checks = _checks_for(
        answers.nodes, "data", settings.kubernetes.data_pods, lambda nodes: [_data_check(nodes, data, settings)]
    )

    def check_training(nodes: Sequence[Json]) -> list[CheckResult]:
        results = [_training_check(nodes, name, amount, settings) for name, amount in training.items()]
        well = all(check.verdict == "ok" for check in (*checks, *results))
        return results + (_together_check(nodes, training, settings) if well else [])

    return checks + _checks_for(answers.nodes, "training", training_placement(settings), check_training)


def _checks_for(
    nodes: Sequence[Json], part: str, placement: PodPlacement, check: Callable[[Sequence[Json]], list[CheckResult]]
) -> list[CheckResult]:
    """The results of `check` for those nodes that pods may run on; or why there are none, and how to get some."""
    selected = [node for node in nodes if placement.node_selector.items() <= (node["metadata"].get("labels") or {}).items()]
    cordoned = [node for node in selected if (node.get("spec") or {}).get("unschedulable")]
    open_nodes = [node for node in selected if node not in cordoned]
    usable = [
        node
        for node in open_nodes
        if all(any(one.tolerates(taint) for one in placement.tolerations) for taint in _taints(node))
    ]
    uncordon = f"kubectl uncordon {' '.join(_names(cordoned)[:3])}"
    if usable:
        results = check(usable)
        return [
            replace(each, remedy=f"{uncordon}, or {each.remedy}") if cordoned and each.verdict != "ok" else each
            for each in results
        ]
    if not selected:
        labels = ", ".join(f"{key}={value}" for key, value in placement.node_selector.items())
        keys = f"kubernetes.{part}_pods.node_selector" + (" and kubernetes.node_selector" if part == "training" else "")
        finding = f"no node has the labels {labels}" if labels else "the cluster has no nodes"
        return [failed(f"{part} pods", finding, f"correct {keys}")]
    if not open_nodes:
        finding = f"cordoned, so that no pod is put on them: {', '.join(_names(cordoned)[:3])}"
        return [failed(f"{part} pods", finding, uncordon)]
    taints = sorted({_taint_text(taint) for node in open_nodes for taint in _taints(node)})
    finding = f"taints that no pod of ours tolerates, on {', '.join(_names(open_nodes)[:3])}: {', '.join(taints)}"
    remedy = f"set kubernetes.{part}_pods.tolerations, or remove the taints"
    return [failed(f"{part} pods", finding, f"{uncordon}, or {remedy}" if cordoned else remedy)]


def _names(nodes: Sequence[Json]) -> list[str]:
    return [node["metadata"]["name"] for node in nodes]


def _taints(node: Json) -> list[Json]:
    taints = (node.get("spec") or {}).get("taints") or ()
    return [taint for taint in taints if taint["effect"] in ("NoSchedule", "NoExecute")]


def _taint_text(taint: Json) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key']}{value}:{taint['effect']}"


def _fitting(node: Json, request: Mapping[str, str]) -> int:
    """How many pods that each ask for `request` fit on an empty `node`."""
    allocatable = {_SCRATCH: "1Ei", **node["status"].get("allocatable", {})}
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
        lacking = [name for name, amount in request.items() if not any(_fitting(node, {name: amount}) for node in nodes)]
        remedy = "; ".join(_RESOURCES[name][1].format(part="data") for name in lacking or ("cpu", "memory"))
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


# --- the limits of the namespace

_Amounts = dict[str, float]

# What a quota on one of them requires every container to name.
_REQUIRED = ("requests.cpu", "requests.memory", "limits.cpu", "limits.memory")
_POD_COUNTS = ("pods", "count/pods")
# Quotas that count other pods than ours, or only those of one priority.
_OTHER_SCOPES = {"BestEffort", "Terminating", "PriorityClass"}
_ASK = "or ask who runs the namespace for more"


def check_limits(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """What the namespace will refuse of the pods and the claim that a run creates; one line if it refuses nothing."""
    if answers.limit_ranges is None or answers.quotas is None:
        finding = "this account may not list limitranges or resourcequotas"
        return [warning("limits", finding, "ask whether the namespace limits pods or volumes")]
    if not answers.limit_ranges and not answers.quotas:
        return [passed("limits", "no LimitRange and no quota")]
    try:
        manifests = render(settings, answers.version)
    except InputError as error:
        finding, _, remedy = str(error).rpartition("; ")
        return [failed("pipeline", finding, remedy)]
    problems = [*_refused_by_ranges(answers, manifests), *_refused_by_quotas(answers, manifests)]
    return problems or [
        passed("limits", f"{len(answers.limit_ranges)} LimitRanges and {len(answers.quotas)} quotas admit all")
    ]


def _new_claim(answers: ClusterAnswers, manifests: Manifests) -> _Amounts | None:
    """The storage of the claim that a run creates; None if it exists, or none is needed."""
    item = next(iter(manifests.of_kind("PersistentVolumeClaim")), None)
    if item is None or item["metadata"]["name"] in answers.claims:
        return None
    return _values(item["spec"]["resources"]["requests"])


# --- LimitRanges: the least and the most of a container, a pod or a claim, and what a container gets that names nothing


@dataclass(frozen=True)
class _Container:
    """What a container asks for once the namespace's defaults are filled in."""

    requests: _Amounts
    limits: _Amounts


def _refused_by_ranges(answers: ClusterAnswers, manifests: Manifests) -> Iterator[CheckResult]:
    """One line for each LimitRange that refuses something."""
    claim = _new_claim(answers, manifests)
    for limit_range in answers.limit_ranges or ():
        name = limit_range["metadata"]["name"]
        for limit in limit_range["spec"].get("limits") or ():
            reason = next(_broken(limit, manifests, claim), None)
            if reason is not None:
                yield failed("limits", f"LimitRange {name} refuses {reason[0]}", f"{reason[1]}, {_ASK}")


def _broken(limit: Json, manifests: Manifests, claim: _Amounts | None) -> Iterator[tuple[str, str]]:
    """What breaks one limit of a LimitRange, each with its remedy."""
    kind = limit.get("type")
    if kind == "PersistentVolumeClaim" and claim is not None:
        yield from _outside(limit, _Container(claim, {}), "the volume claim", "change kubernetes.storage")
    for step in manifests.steps:
        part = "training" if STEPS[step].trains else "data"
        for spec in manifests.pod_specs(step):
            containers = [*spec.get("initContainers", ()), *spec["containers"]]
            filled = {f"container {each['name']}": _filled(each, [limit]) for each in containers}
            if kind == "Pod":
                filled = {"a pod": _pod(list(filled.values()))}
            for where, amounts in filled.items() if kind in ("Container", "Pod") else ():
                yield from _outside(limit, amounts, f"{where} of {step}", f"change resources.{part}")


def _outside(limit: Json, container: _Container, where: str, remedy: str) -> Iterator[tuple[str, str]]:
    for resource, most in (limit.get("max") or {}).items():
        amount = max(container.requests.get(resource, 0.0), container.limits.get(resource, 0.0))
        if amount > quantity_value(str(most)):
            yield f"{where}: {quantity_text(resource, amount)}, at most {most}", f"{remedy} to at most that"
    for resource, least in (limit.get("min") or {}).items():
        if container.requests.get(resource, 0.0) < quantity_value(str(least)):
            amount = container.requests.get(resource, 0.0)
            yield f"{where}: {quantity_text(resource, amount)}, at least {least}", f"{remedy} to at least that"
    for resource, amount in container.limits.items():
        requested = container.requests.get(resource, 0.0)
        ratio = (limit.get("maxLimitRequestRatio") or {}).get(resource)
        if requested > amount:
            texts = quantity_text(resource, requested), quantity_text(resource, amount)
            yield f"{where}: it requests {texts[0]}, and its limit would be {texts[1]}", f"{remedy} to at most that"
        if ratio is not None and amount > requested * quantity_value(str(ratio)):
            yield f"{where}: its limit of {resource} is more than {ratio} times its request", remedy


def _filled(container: Manifest, limits: list[Json]) -> _Container:
    """The requests and limits of a container, with the defaults of LimitRanges: a maximum is one, too."""
    resources = container["resources"]
    requests, limited = dict(resources.get("requests") or {}), dict(resources.get("limits") or {})
    for limit in limits:
        if limit.get("type") == "Container":
            limited = {**(limit.get("max") or {}), **(limit.get("default") or {}), **limited}
            requests = {**(limit.get("defaultRequest") or {}), **requests}
    return _Container(_values({**limited, **requests}), _values(limited))


def _values(amounts: Mapping[str, Any]) -> _Amounts:
    return {name: quantity_value(str(amount)) for name, amount in amounts.items()}


def _pod(containers: list[_Container]) -> _Container:
    """The requests and limits of a pod; its one init container, which only waits, never asks for more than the others."""
    requests, limits = (_sum([getattr(each, kind) for each in containers]) for kind in ("requests", "limits"))
    return _Container(requests, limits)


def _sum(parts: list[_Amounts]) -> _Amounts:
    return {name: sum(part.get(name, 0.0) for part in parts) for name in {name for part in parts for name in part}}


# --- ResourceQuotas: the most of all pods of a namespace together


def _refused_by_quotas(answers: ClusterAnswers, manifests: Manifests) -> Iterator[CheckResult]:
    """One line for each amount of a quota that the pods of a step exceed, or that a container does not name."""
    limits = [limit for each in answers.limit_ranges or () for limit in each["spec"].get("limits") or ()]
    claim = _new_claim(answers, manifests)
    for quota in answers.quotas or ():
        spec = quota["spec"]
        if not spec.get("scopeSelector") and not _OTHER_SCOPES & set(spec.get("scopes") or ()):
            for key, hard in (spec.get("hard") or {}).items():
                if key == "requests.storage" and claim is not None and claim["storage"] > quantity_value(str(hard)):
                    finding = f"quota {quota['metadata']['name']} allows {hard} {key}"
                    yield failed("limits", finding, f"lower kubernetes.storage, {_ASK}")
                used = (quota.get("status", {}).get("used") or {}).get(key, "0")
                yield from _exceeded(quota["metadata"]["name"], key, str(hard), str(used), manifests, limits)


def _exceeded(quota: str, key: str, hard: str, used: str, manifests: Manifests, limits: list[Json]) -> Iterator[CheckResult]:
    """The first step that a quota does not admit: never, or not at present."""
    in_use: CheckResult | None = None
    for step, item in manifests.steps.items():
        part = "training" if STEPS[step].trains else "data"
        needed, unnamed = _needed(item, manifests.pod_specs(step), key, limits)
        if unnamed:
            remedy = "ask for a LimitRange with a default, or set kubernetes.namespace to another"
            yield failed("limits", f"quota {quota} has {key}, which container {unnamed} of {step} does not name", remedy)
            return
        finding = f"quota {quota} allows {hard} {key}, and {step} needs {needed:g}"
        if needed > quantity_value(hard):
            yield failed("limits", finding, _less_of(item, key, part))
            return
        if in_use is None and needed > quantity_value(hard) - quantity_value(used):
            in_use = warning("limits", f"{finding}, of which {used} is in use", "wait until it has room, or ask for more")
    if in_use is not None:
        yield in_use


def _less_of(item: Manifest, key: str, part: str) -> str:
    """How a step takes less of a quota's amount, or gets more of it."""
    settings = [] if key in _POD_COUNTS else [f"resources.{part}"]
    settings += ["resources.workers"] if _pods_at_once(item)[-1] > 1 else []
    return f"lower {' or '.join(settings)}, {_ASK}" if settings else _ASK.removeprefix("or ")


def _pods_at_once(item: Manifest) -> list[int]:
    """How many pods of each template a step needs at once: those of a Job can do its work one after another."""
    if item["kind"] == "MPIJob":
        return [1, item["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]]
    return [expected_pods(item) if needs_all_pods(item) else 1]


def _needed(item: Manifest, specs: list[Manifest], key: str, limits: list[Json]) -> tuple[float, str]:
    """How much of a quota's amount a step needs at once, and the container that should name it, but does not."""
    counts = _pods_at_once(item)
    if key in _POD_COUNTS:
        return float(sum(counts)), ""
    kind, _, resource = key.partition(".") if key.startswith(("requests.", "limits.")) else ("requests", "", key)
    total = 0.0
    for count, spec in zip(counts, specs, strict=True):
        parts = {each["name"]: getattr(_filled(each, limits), kind) for each in spec["containers"]}
        for name, part in parts.items():
            if resource not in part and f"{kind}.{resource}" in _REQUIRED:
                return 0.0, name
        total += count * sum(part.get(resource, 0.0) for part in parts.values())
    return total, ""
