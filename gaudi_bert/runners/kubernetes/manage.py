"""`k8s status`, `k8s logs` and `k8s delete`: what a pipeline has on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gaudi_bert.artefacts.object_store import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.follow import followed_container
from gaudi_bert.runners.kubernetes.manifests import PIPELINE_LABEL, POD_LABELS, render
from gaudi_bert.runners.kubernetes.pods import STEP_LABEL, Manifest
from gaudi_bert.runners.kubernetes.reasons import (
    current_pods,
    describe_suspension,
    is_suspended,
    job_outcome,
    pods_of,
    step_problem,
)
from gaudi_bert.runners.kubernetes.run import refuse_foreign
from gaudi_bert.runners.launch import RANK_TAG

# What a pipeline shares by these names, whatever its settings were when it did.
_SHARED = {
    "ServiceAccount": "stages",
    "PersistentVolumeClaim": "work",
    "Service": "train",
    "NetworkPolicy": "train",
    "TrainingRuntime": "train",
}


def status(settings: PipelineSettings, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return how far each step is.

    `state` is `not submitted`, `suspended`, `waiting`, `running`, `complete`, or `failed: <reason>`; of what is submitted,
    `pods` counts the pods in each phase, without those that were replaced; `problem` is what it waits for or what is wrong.
    """
    cluster.check_namespace()
    return {step: _step_status(cluster, item) for step, item in render(settings).steps.items()}


def status_lines(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the states of steps for people."""
    lines = []
    for step, status in steps.items():
        pods = ", ".join(f"{count} {phase}" for phase, count in status.get("pods", {}).items())
        lines.append(f"{step}: {status['state']}" + (f" ({pods})" if pods else ""))
        lines += [f"  {status['problem']}"] if status.get("problem") else []
    return lines


def _step_status(cluster: Cluster, item: Manifest) -> dict[str, Any]:
    submitted = _submitted(cluster, item)
    if submitted is None:
        return {"state": "not submitted"}
    pods, outcome = pods_of(cluster, submitted), job_outcome(submitted)
    phases = [pod.get("status", {}).get("phase", "Unknown") for pod in current_pods(pods)]
    state, problem = outcome or ("running" if "Running" in phases else "waiting"), None
    if outcome is None and is_suspended(submitted):
        state, problem = "suspended", describe_suspension(cluster, submitted)
    elif outcome != "complete":
        reported = step_problem(cluster, submitted, pods)
        problem = None if reported is None else str(reported)
    return {"state": state, "pods": {phase: phases.count(phase) for phase in sorted(set(phases))}, "problem": problem}


def _submitted(cluster: Cluster, item: Manifest) -> Manifest | None:
    """The step on the cluster: of its kind, or of the kind that it was when the pipeline had other settings."""
    trains = item["metadata"]["labels"][STEP_LABEL] == "train"
    for kind in dict.fromkeys((item["kind"], *(POD_LABELS if trains else ()))):
        existing = cluster.read(kind, item["metadata"]["name"], if_allowed=kind != item["kind"])
        if existing is not None:
            return {**existing, "kind": kind}
    return None


def show_logs(settings: PipelineSettings, step: str | None, cluster: Cluster, show: Callable[[str], None]) -> int:
    """Show the logs of all pods of `step`, or of all steps, line by line; how many pods there were."""
    cluster.check_namespace()
    steps = render(settings).steps
    if step is not None and step not in steps:
        raise InputError(f"--step {step}: no such step; steps are {', '.join(steps)}")
    shown = 0
    for name, item in steps.items():
        if step not in (None, name):
            continue
        for pod in pods_of(cluster, _submitted(cluster, item) or item):
            container = followed_container(pod)
            if container is not None and pod.get("status", {}).get("phase") != "Pending":
                shown += 1
                for line in cluster.log_lines(pod["metadata"]["name"], container, follow=False):
                    show(f"[{pod['metadata']['name']}] {RANK_TAG.sub('', line.partition(' ')[2])}")
    if not shown:
        raise InputError(f"no pod of {step or settings.name} has started in namespace {cluster.namespace}; see `k8s status`")
    return shown


def delete(settings: PipelineSettings, cluster: Cluster, *, data: bool) -> list[str]:
    """Remove all Jobs of the pipeline and what they share; with `data`, the work folder too: its volume, or its objects.

    The result lists what was removed, as `Kind name`. The Jobs go first: they are gone where the store then refuses.

    Raises:
        InputError: what has the name of one of its objects is not its own; nothing was removed.
    """
    cluster.check_namespace()
    used = {"ConfigMap", *(item["kind"] for item in render(settings).steps.values())}
    # Those that kubectl applied carry a digest in their name.
    items = [
        (kind, item)
        for kind in (*reversed(POD_LABELS), "ConfigMap")
        for item in cluster.find(kind, f"{PIPELINE_LABEL}={settings.name}", if_allowed=kind not in used)
    ]
    for kind, name in _SHARED.items():
        item = cluster.read(kind, f"{settings.name}-{name}", if_allowed=True)
        if item is not None and (kind != "PersistentVolumeClaim" or data):
            refuse_foreign(settings, item, kind)
            items.append((kind, item))
    names = [(kind, item["metadata"]["name"]) for kind, item in items]
    removed = [f"{kind} {name}" for kind, name in names if cluster.delete(kind, name)]
    if data and settings.kubernetes.store:
        # What is below the work folder of this pipeline, and nothing else of the bucket.
        objects, url = Objects(settings.store), f"{settings.kubernetes.store}/{settings.name}"
        urls = [f"{url}/{name}" for name in objects.list(url)]
        with ThreadPoolExecutor(settings.store.connections) as pool:
            for _ in pool.map(objects.remove, urls):
                pass
        removed += [f"{len(urls):,} objects below {url}"] if urls else []
    return removed
