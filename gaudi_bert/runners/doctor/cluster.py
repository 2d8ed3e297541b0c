"""Is a cluster ready for a pipeline: is it reachable, is the namespace there, which rights are missing, and what does the
server say to each object that a run would create?

The server answers for its own rules, in its own words, by a dry run of everything: quotas, limits, pod security, missing
classes and operators. Nothing is created.
"""

from __future__ import annotations

from typing import NamedTuple

from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, refused, warning
from gaudi_bert.runners.kubernetes.client import (
    KINDS,
    Cluster,
    Connection,
    ForbiddenError,
    Json,
    NotFoundError,
    title_of,
)
from gaudi_bert.runners.kubernetes.manifests import Manifests, check_paths, render

_OLDEST = (1, 24)


def examine_cluster(settings: PipelineSettings, reporter: Reporter, cluster: Cluster | None = None) -> list[CheckResult]:
    """Check the cluster that the kubeconfig file names, in an order in which fixing makes sense."""
    check_paths(settings)  # what no cluster can run is refused before the first request
    if cluster is None:
        cluster = Cluster(settings.kubernetes.namespace, Connection(say=reporter.say))
    version = cluster.version()
    results = [_check_version(version, settings), _check_namespace(cluster), _check_rights(cluster, settings)]
    if any(result.verdict == "failed" for result in results[:2]):
        return results
    manifests = render(settings, version)
    return results + _check_objects(cluster, manifests) + _check_pods(cluster, manifests)


def _check_version(version: tuple[int, int], settings: PipelineSettings) -> CheckResult:
    shown = ".".join(map(str, version))
    if version < _OLDEST:
        return failed("Kubernetes", shown, f"Indexed Jobs need {'.'.join(map(str, _OLDEST))} or later: upgrade the cluster")
    if version < settings.kubernetes.version_numbers:
        finding = f"{shown}, older than kubernetes.version: {settings.kubernetes.version}"
        return failed("Kubernetes", finding, f"set kubernetes.version to '{shown}'")
    return passed("Kubernetes", shown)


def _check_namespace(cluster: Cluster) -> CheckResult:
    name = cluster.namespace
    try:
        phase = cluster.read_namespace()["status"].get("phase")
    except ForbiddenError:
        return warning("namespace", f"this account may not look at {name} itself", "ask whether it exists")
    except NotFoundError:
        return failed("namespace", f"{name} does not exist", f"kubectl create namespace {name}")
    if phase == "Terminating":
        return failed("namespace", f"{name} is being removed", "wait until it is gone, or set kubernetes.namespace")
    return passed("namespace", name)


# --- rights


class _Right(NamedTuple):
    """One thing that an account may do in the namespace of a run."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


def needed_rights(*, training: str, queue: bool, network_policy: bool) -> list[_Right]:
    """Return what an account must be allowed to do; `training` is `job`, `nodes`, `mpijob` or `trainjob`.

    What a pipeline does not use is not required. What is submitted to a queue has Workloads that show why it waits.
    """
    optional = {
        "Workload": queue,
        "NetworkPolicy": network_policy,
        "Service": training == "nodes",
        "MPIJob": training == "mpijob",
        "TrainJob": training == "trainjob",
        "TrainingRuntime": training == "trainjob",
    }
    unneeded = {KINDS[kind].plural for kind, needed in optional.items() if not needed}
    rights = {_Right(kind.group, kind.plural, verb) for kind in KINDS.values() for verb in kind.verbs}
    return sorted(right for right in {*rights, _Right("", "pods/log", "get")} if right.resource not in unneeded)


def _check_rights(cluster: Cluster, settings: PipelineSettings) -> CheckResult:
    rights = needed_rights(
        training="nodes" if settings.needs_service else settings.training_kind,
        queue=settings.kubernetes.queue is not None,
        network_policy=settings.has_network_policy,
    )
    missing = [str(right) for right in rights if not cluster.is_allowed(*right)]
    if missing:
        return failed("rights", f"may not {', '.join(missing)}", "ask for the Role in k8s/in-cluster")
    return passed("rights", f"all {len(rights)} that a run uses")


# --- what the server answers to the objects of a run, without creating them


def _check_objects(cluster: Cluster, manifests: Manifests) -> list[CheckResult]:
    items = [*manifests.shared, *manifests.steps.values()]
    own_claims = {item["metadata"]["name"] for item in items if item["kind"] == "PersistentVolumeClaim"}
    existing_items = {title_of(item): _read(cluster, item["kind"], item["metadata"]["name"]) for item in items}
    lacks_runtime = any(item is None for title, item in existing_items.items() if title.startswith("TrainingRuntime "))
    results = []
    for item in items:
        title = title_of(item)
        existing = existing_items[title]
        if existing is not None:
            results.append(_check_existing(cluster, title, existing))
        elif item["kind"] == "TrainJob" and lacks_runtime:
            results.append(passed(title, "checked when its TrainingRuntime is there"))
        else:
            results.append(_try_to_create(cluster, title, item))
    specs = [spec for step in manifests.steps for spec in manifests.pod_specs(step)]
    volumes = [volume for spec in specs for volume in spec.get("volumes", ()) if "persistentVolumeClaim" in volume]
    for name in sorted({volume["persistentVolumeClaim"]["claimName"] for volume in volumes} - own_claims):
        claim = _read(cluster, "PersistentVolumeClaim", name)
        title = f"PersistentVolumeClaim {name}"
        missing = failed(title, "is not there", "create it, or correct kubernetes.work_claim or kubernetes.data_claim")
        results.append(missing if claim is None else _check_existing(cluster, title, claim))
    return results


def _read(cluster: Cluster, kind: str, name: str) -> Json | None:
    try:
        return cluster.read(kind, name)
    except ForbiddenError:
        return None  # the missing right is reported by itself


def _check_existing(cluster: Cluster, title: str, item: Json) -> CheckResult:
    """Check an object that exists: a claim that is not bound shows the cluster's last warning about it."""
    metadata, phase = item["metadata"], (item.get("status") or {}).get("phase")
    if metadata.get("deletionTimestamp"):
        return failed(title, "Terminating: it is being removed", "end the pods that use it, and wait until it is gone")
    if item.get("kind", title.split()[0]) != "PersistentVolumeClaim" or phase == "Bound":
        return passed(title, "is there already")
    words = [event.get("message", "") for event in cluster.events(metadata["name"])]
    finding = f"{phase or 'not bound'}: {' '.join(words[-1].split()) if words else 'the cluster says nothing of it'}"
    return warning(
        title, finding, "if it stays so, correct kubernetes.storage_class or access_mode, and `k8s delete --data`"
    )


def _try_to_create(cluster: Cluster, title: str, item: Json) -> CheckResult:
    try:
        cluster.create(item, dry_run=True)
    except GaudiBertError as error:
        return refused(title, error)
    return passed(title, "the server would create it")


def _check_pods(cluster: Cluster, manifests: Manifests) -> list[CheckResult]:
    """Let the server check the pods of each step, which it else refuses only when a Job makes them; with the right to."""
    if not cluster.is_allowed("", "pods", "create"):
        return []
    results = []
    for step in manifests.steps:
        for number, spec in enumerate(manifests.pod_specs(step)):
            # The account may not be there yet.
            own = {key: value for key, value in spec.items() if key not in ("serviceAccountName", "serviceAccount")}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"doctor-{step}-{number}"}, "spec": own}
            result = _try_to_create(cluster, f"pods of {step}", pod)
            if result.verdict != "ok":
                results.append(result)
    return results or [passed("pods", "the server would create those of every step")]
