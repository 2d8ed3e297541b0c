"""Cores, memory, cards and huge pages of the containers that a stage runs in, as Kubernetes writes quantities.

With cards, requests equal limits in everything: extended resources and huge pages allow nothing else, and a pod with
reserved cores and memory is evicted last. Without cards, cores are only requested, so that idle ones are used.
"""

from __future__ import annotations

import re
from typing import Any

from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodResources, ResourceSettings

CARD_RESOURCE = "habana.ai/gaudi"
EFA_RESOURCE = "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"
_MEBIBYTE = 2**20
_UNITS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3}
_UNITS |= {letter: 1000.0**power for power, letter in enumerate(("k", "M", "G", "T", "P", "E"), 1)}
_UNITS |= {f"{letter}i": 1024.0**power for power, letter in enumerate(("K", "M", "G", "T", "P", "E"), 1)}


def quantity_value(quantity: str) -> float:
    """A Kubernetes quantity as a number: cores, bytes or pieces; a ValueError if it is not a quantity."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([A-Za-z]*)", quantity)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{quantity!r} is not a quantity")
    return float(match[1]) * _UNITS[match[2]]


def quantity_text(resource: str, value: float) -> str:
    """An amount of a resource as a person writes it: `2 cpu`, `409Gi memory`, `8 habana.ai/gaudi`."""
    if resource not in ("memory", HUGE_PAGES, "ephemeral-storage", "storage"):
        return f"{value:g} {resource}"
    unit, power = next(
        ((unit, power) for power, unit in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")) if value >= 1024**power), ("", 0)
    )
    return f"{round(value / 1024**power, 1):g}{unit} {resource}"


def pod_resources(pod: PodResources) -> dict[str, Any]:
    """The `resources` of a container without cards."""
    return {"requests": {"cpu": pod.cpu, "memory": pod.memory}, "limits": {"memory": pod.memory_limit or pod.memory}}


def training_resources(settings: PipelineSettings) -> dict[str, Any]:
    """The `resources` of a container that trains."""
    resources = settings.resources
    if not resources.cards:
        return pod_resources(resources.training)
    requests = {"cpu": resources.training.cpu, "memory": resources.training.memory, CARD_RESOURCE: str(resources.cards)}
    if quantity_value(resources.hugepages_2Mi):
        requests[HUGE_PAGES] = resources.hugepages_2Mi
    if settings.kubernetes.efa:
        requests[EFA_RESOURCE] = str(settings.kubernetes.efa)
    return {"requests": requests, "limits": dict(requests)}


def evaluation_resources(resources: ResourceSettings) -> dict[str, Any]:
    """The `resources` of evaluation: one card and its share of a training worker, or what training takes without cards."""
    if not resources.cards:
        return pod_resources(resources.training)
    memory = int(quantity_value(resources.training.memory) / resources.cards / _MEBIBYTE)
    cores = int(quantity_value(resources.training.cpu) * 1000 / resources.cards)
    requests = {
        "cpu": str(cores // 1000) if cores >= 1000 else f"{max(cores, 1)}m",
        "memory": f"{memory}Mi",
        CARD_RESOURCE: "1",
    }
    # Whole pages of 2 MiB.
    huge_pages = int(quantity_value(resources.hugepages_2Mi) / resources.cards / (2 * _MEBIBYTE)) * 2
    if huge_pages:
        requests[HUGE_PAGES] = f"{huge_pages}Mi"
    return {"requests": requests, "limits": dict(requests)}
