"""Which nodes of a cluster take pods, and their room: cores, memory, disk, cards, huge pages, EFA devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodPlacement
from gaudi_bert.runners.doctor.answers import ClusterAnswers
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning
from gaudi_bert.runners.kubernetes.manifests import training_placement
from gaudi_bert.runners.resources import (
    CARD_RESOURCE,
    EFA_RESOURCE,
    HUGE_PAGES,
    pod_resources,
    quantity_text,
    quantity_value,
    training_resources,
)

Json = dict[str, Any]

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
    usable = [node for node in selected if node not in cordoned and _tolerates(placement, node)]
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
        return [
            failed(
                f"{part} pods",
                f"no node has the labels {labels}" if labels else "the cluster has no nodes",
                f"correct {keys}",
            )
        ]
    if len(cordoned) == len(selected):
        return [
            failed(f"{part} pods", f"cordoned, so that no pod is put on them: {', '.join(_names(cordoned)[:3])}", uncordon)
        ]
    closed = [node for node in selected if node not in cordoned]
    taints = sorted({_taint_text(taint) for node in closed for taint in _taints(node)})
    finding = f"taints that no pod of ours tolerates, on {', '.join(_names(closed)[:3])}: {', '.join(taints)}"
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


def _tolerates(placement: PodPlacement, node: Json) -> bool:
    return all(any(one.tolerates(taint) for one in placement.tolerations) for taint in _taints(node))


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
