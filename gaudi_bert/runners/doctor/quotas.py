"""The limits of a namespace: whether its LimitRanges and ResourceQuotas admit the pods and the volume of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.doctor.answers import ClusterAnswers
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning
from gaudi_bert.runners.kubernetes.kustomize import Manifest
from gaudi_bert.runners.kubernetes.manifests import Manifests, pod_specs, render
from gaudi_bert.runners.resources import quantity_text, quantity_value
from gaudi_bert.runners.stage_table import STEPS

Json = dict[str, Any]
Amounts = dict[str, float]

# What a quota on one of them requires every container to name.
_REQUIRED = ("requests.cpu", "requests.memory", "limits.cpu", "limits.memory")
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


def _new_claims(answers: ClusterAnswers, manifests: Manifests) -> list[Amounts]:
    """The storage of the claim that a run creates; nothing if it exists."""
    claims = [item for item in manifests.shared if item["kind"] == "PersistentVolumeClaim"]
    new = [item for item in claims if item["metadata"]["name"] not in answers.claims]
    return [_values({"storage": item["spec"]["resources"]["requests"]["storage"]}) for item in new]


# --- LimitRanges: the least and the most of a container, a pod or a claim, and what a container gets that names nothing


@dataclass(frozen=True)
class _Container:
    """What a container asks for once the namespace's defaults are filled in."""

    requests: Amounts
    limits: Amounts


def _refused_by_ranges(answers: ClusterAnswers, manifests: Manifests) -> Iterator[CheckResult]:
    """One line for each LimitRange that refuses something."""
    claims = _new_claims(answers, manifests)
    for limit_range in answers.limit_ranges or ():
        name = limit_range["metadata"]["name"]
        for limit in limit_range["spec"].get("limits") or ():
            reason = next(_broken(limit, manifests, claims), None)
            if reason is not None:
                yield failed("limits", f"LimitRange {name} refuses {reason[0]}", f"{reason[1]}, {_ASK}")


def _broken(limit: Json, manifests: Manifests, claims: list[Amounts]) -> Iterator[tuple[str, str]]:
    """What breaks one limit of a LimitRange, each with its remedy."""
    kind = limit.get("type")
    if kind == "PersistentVolumeClaim":
        for claim in claims:
            yield from _outside(limit, _Container(claim, {}), "the volume claim", "change kubernetes.storage")
    for step, item in manifests.steps.items():
        part = "training" if STEPS[step].trains else "data"
        for spec in pod_specs(item):
            containers = {each["name"]: _filled(each, [limit]) for each in _containers(spec)}
            together = {"": _pod(list(containers.values()))} if kind == "Pod" else {}
            for name, container in (containers if kind == "Container" else together).items():
                where = f"container {name} of {step}" if name else f"a pod of {step}"
                yield from _outside(limit, container, where, f"change resources.{part}")


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


def _containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def _filled(container: Manifest, limits: list[Json]) -> _Container:
    """The requests and limits of a container, with the defaults of LimitRanges: a maximum is one, too."""
    resources = container["resources"]
    requests, limited = dict(resources.get("requests") or {}), dict(resources.get("limits") or {})
    for limit in limits:
        if limit.get("type") == "Container":
            limited = {**(limit.get("max") or {}), **(limit.get("default") or {}), **limited}
            requests = {**(limit.get("defaultRequest") or {}), **requests}
    return _Container(_values({**limited, **requests}), _values(limited))


def _values(amounts: Mapping[str, Any]) -> Amounts:
    return {name: quantity_value(str(amount)) for name, amount in amounts.items()}


def _pod(containers: list[_Container]) -> _Container:
    """The requests and limits of a pod; its one init container, which only waits, never asks for more than the others."""
    requests, limits = (_sum([getattr(each, kind) for each in containers]) for kind in ("requests", "limits"))
    return _Container(requests, limits)


def _sum(parts: list[Amounts]) -> Amounts:
    return {name: sum(part.get(name, 0.0) for part in parts) for name in {name for part in parts for name in part}}


# --- ResourceQuotas: the most of all pods of a namespace together


def _refused_by_quotas(answers: ClusterAnswers, manifests: Manifests) -> Iterator[CheckResult]:
    """One line for each amount of a quota that the pods of a step exceed, or that a container does not name."""
    limits = [limit for each in answers.limit_ranges or () for limit in each["spec"].get("limits") or ()]
    claims = _new_claims(answers, manifests)
    for quota in answers.quotas or ():
        spec = quota["spec"]
        if not spec.get("scopeSelector") and not _OTHER_SCOPES & set(spec.get("scopes") or ()):
            for key, hard in (spec.get("hard") or {}).items():
                if key == "requests.storage" and any(claim["storage"] > quantity_value(str(hard)) for claim in claims):
                    finding = f"quota {quota['metadata']['name']} allows {hard} {key}"
                    yield failed("limits", finding, f"lower kubernetes.storage, {_ASK}")
                used = (quota.get("status", {}).get("used") or {}).get(key, "0")
                yield from _exceeded(quota["metadata"]["name"], key, str(hard), str(used), manifests, limits)


def _exceeded(quota: str, key: str, hard: str, used: str, manifests: Manifests, limits: list[Json]) -> Iterator[CheckResult]:
    """The first step that a quota does not admit: never, or not at present."""
    in_use: CheckResult | None = None
    for step, item in manifests.steps.items():
        part = "training" if STEPS[step].trains else "data"
        needed, unnamed = _needed(item, key, limits)
        if unnamed:
            remedy = "ask for a LimitRange with a default, or set kubernetes.namespace to another"
            yield failed("limits", f"quota {quota} has {key}, which container {unnamed} of {step} does not name", remedy)
            return
        finding = f"quota {quota} allows {hard} {key}, and {step} needs {needed:g}"
        if needed > quantity_value(hard):
            yield failed("limits", finding, f"lower resources.{part}, {_ASK}")
            return
        if in_use is None and needed > quantity_value(hard) - quantity_value(used):
            in_use = warning("limits", f"{finding}, of which {used} is in use", "wait until it has room, or ask for more")
    if in_use is not None:
        yield in_use


def _needed(item: Manifest, key: str, limits: list[Json]) -> tuple[float, str]:
    """How much of a quota's amount a step needs at once, and the container that should name it, but does not.

    The pods of a Job can do its work one after another; those of an MPIJob cannot.
    """
    counts = [1, item["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]] if item["kind"] == "MPIJob" else [1]
    if key in ("pods", "count/pods"):
        return float(sum(counts)), ""
    kind, _, resource = key.partition(".") if key.startswith(("requests.", "limits.")) else ("requests", "", key)
    total = 0.0
    for count, spec in zip(counts, pod_specs(item), strict=True):
        parts = {each["name"]: getattr(_filled(each, limits), kind) for each in spec["containers"]}
        for name, part in parts.items():
            if resource not in part and f"{kind}.{resource}" in _REQUIRED:
                return 0.0, name
        total += count * sum(part.get(resource, 0.0) for part in parts.values())
    return total, ""
