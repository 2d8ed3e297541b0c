"""Room on the nodes of a cluster: cores, memory, cards, huge pages, EFA devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodPlacement
from gaudi_bert.runners.doctor.answers import ClusterAnswers
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning
from gaudi_bert.runners.kubernetes.jobs import training_placement
from gaudi_bert.runners.requirements import (
    CARD_RESOURCE,
    EFA_RESOURCE,
    HUGE_PAGES,
    pod_resources,
    quantity_text,
    quantity_value,
    training_resources,
)

Json = dict[str, Any]

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


def check_nodes(answers: ClusterAnswers, settings: PipelineSettings) -> list[CheckResult]:
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
