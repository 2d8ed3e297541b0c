"""What each container asks a cluster for, from a pipeline's `resources`. Quantities are strings, as Kubernetes wants them.

With cards, requests equal limits in everything: extended resources and huge pages allow nothing else, and a pod whose cores
and memory are its own is the last to be evicted. Without cards, cores are only requested, so that idle ones are used.
"""

from __future__ import annotations

import re
from typing import Any

from gaudi_bert.config import PipelineSettings, PodResources, ResourceSettings

__all__ = [
    "CARD_RESOURCE",
    "EFA_RESOURCE",
    "HUGE_PAGES",
    "evaluation_resources",
    "pod_resources",
    "quantity_text",
    "quantity_value",
    "training_resources",
]

CARD_RESOURCE = "habana.ai/gaudi"
EFA_RESOURCE = "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"
_MEBIBYTE = 2**20
_UNITS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3}
_UNITS |= {letter: 1000.0**power for power, letter in enumerate(("k", "M", "G", "T", "P", "E"), 1)}
_UNITS |= {f"{letter}i": 1024.0**power for power, letter in enumerate(("K", "M", "G", "T", "P", "E"), 1)}


def quantity_value(quantity: str) -> float:
    """A Kubernetes quantity as a number: cores, bytes or pieces.

    Raises:
        ValueError: not a quantity.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([A-Za-z]*)", quantity)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{quantity!r} is not a quantity")
    return float(match[1]) * _UNITS[match[2]]


def quantity_text(resource: str, value: float) -> str:
    """An amount of a resource as a person writes it: `2 cpu`, `409Gi memory`, `8 habana.ai/gaudi`."""
    if resource not in ("memory", HUGE_PAGES):
        return f"{value:g} {resource}"
    unit, power = next(
        ((unit, power) for power, unit in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")) if value >= 1024**power), ("", 0)
    )
    return f"{round(value / 1024**power, 1):g}{unit} {resource}"


def pod_resources(asked: PodResources) -> dict[str, Any]:
    """The `resources` of a container without cards."""
    return {
        "requests": {"cpu": asked.cpu, "memory": asked.memory},
        "limits": {"memory": asked.memory_limit or asked.memory},
    }


def training_resources(settings: PipelineSettings) -> dict[str, Any]:
    """The `resources` of a container that trains."""
    resources = settings.resources
    if not resources.cards:
        return pod_resources(resources.training)
    asked = {"cpu": resources.training.cpu, "memory": resources.training.memory, CARD_RESOURCE: str(resources.cards)}
    if quantity_value(resources.hugepages_2Mi):
        asked[HUGE_PAGES] = resources.hugepages_2Mi
    if settings.kubernetes.efa:
        asked[EFA_RESOURCE] = str(settings.kubernetes.efa)
    return {"requests": asked, "limits": dict(asked)}


def evaluation_resources(resources: ResourceSettings) -> dict[str, Any]:
    """The `resources` of evaluation: one card and its share of a training worker, or what training takes without cards."""
    if not resources.cards:
        return pod_resources(resources.training)
    memory = int(quantity_value(resources.training.memory) / resources.cards / _MEBIBYTE)
    cores = int(quantity_value(resources.training.cpu) * 1000 / resources.cards)
    asked = {
        "cpu": str(cores // 1000) if cores >= 1000 else f"{max(cores, 1)}m",
        "memory": f"{memory}Mi",
        CARD_RESOURCE: "1",
    }
    # Whole pages of 2 MiB.
    huge_pages = int(quantity_value(resources.hugepages_2Mi) / resources.cards / (2 * _MEBIBYTE)) * 2
    if huge_pages:
        asked[HUGE_PAGES] = f"{huge_pages}Mi"
    return {"requests": asked, "limits": dict(asked)}
