"""Show or delete the objects that a pipeline has on a cluster, for `gaudi-bert k8s status`, `k8s logs` and `k8s delete`.

Only objects that carry the labels of the pipeline are shown and deleted. Objects of others that have the same names are
reported or left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.client import Cluster, Json
from gaudi_bert.runners.kubernetes.follow import followed_container
from gaudi_bert.runners.kubernetes.manifests import POD_LABELS, is_own, own_selector, render
from gaudi_bert.runners.kubernetes.pods import STEP_LABEL, Manifest, work_claim_name
from gaudi_bert.runners.kubernetes.reasons import (
    current_pods,
    is_suspended,
    job_outcome,
    pods_of,
    step_problem,
    suspension_problem,
)
from gaudi_bert.runners.kubernetes.run import foreign_error
from gaudi_bert.runners.training_processes import RANK_TAG

# The objects that the steps of a pipeline share, by kind and name suffix. `delete` looks for all of them, because earlier
# settings of the pipeline may have created objects that the current settings do not need.
_SHARED = {
    "ServiceAccount": "stages",
    "PersistentVolumeClaim": "work",
    "Service": "train",
    "NetworkPolicy": "train",
    "TrainingRuntime": "train",
}


def status(settings: PipelineSettings, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return the status of each step of a pipeline.

    Returns:
        For each step a dictionary. Its `state` is `not submitted`, `suspended`, `waiting`, `running`, `complete` or
        `failed: <reason>`. For a submitted step, `pods` maps each pod phase to the number of pods in it, without pods that
        were replaced, and `problem` says what the step waits for or what is wrong, or is None.

    Raises:
        InputError: The namespace does not exist, or pods cannot read a path of the pipeline.
        ClusterError: The cluster rejected a request or does not answer.
    """
    cluster.check_namespace()
    return {step: _step_status(settings, cluster, item) for step, item in render(settings).steps.items()}


def status_lines(steps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the result of `status` as lines of text."""
    lines = []
    for step, status in steps.items():
        pods = ", ".join(f"{count} {phase}" for phase, count in status.get("pods", {}).items())
        lines.append(f"{step}: {status['state']}" + (f" ({pods})" if pods else ""))
        lines += [f"  {status['problem']}"] if status.get("problem") else []
    return lines


def _step_status(settings: PipelineSettings, cluster: Cluster, item: Manifest) -> dict[str, Any]:
    """Return the status of one step, as described in `status`."""
    submitted = _find_submitted(cluster, item)
    if submitted is None:
        return {"state": "not submitted"}
    if not is_own(settings, submitted):
        return {"state": "not submitted", "problem": str(foreign_error(settings, submitted, submitted["kind"]))}
    pods, outcome = pods_of(cluster, submitted), job_outcome(submitted)
    phases = [pod.get("status", {}).get("phase", "Unknown") for pod in current_pods(pods)]
    state, problem = outcome or ("running" if "Running" in phases else "waiting"), None
    if outcome is None and is_suspended(submitted):
        state, problem = "suspended", str(suspension_problem(cluster, submitted))
    elif outcome != "complete":
        reported = step_problem(cluster, submitted, pods)
        problem = None if reported is None else str(reported)
    return {"state": state, "pods": {phase: phases.count(phase) for phase in sorted(set(phases))}, "problem": problem}


def _find_submitted(cluster: Cluster, item: Manifest) -> Manifest | None:
    """Return the object on the cluster that has the name of a step, or None if there is none.

    For the step `train`, objects of the kinds that it had with other settings are also found. The object may belong to
    somebody else.
    """
    trains = item["metadata"]["labels"][STEP_LABEL] == "train"
    for kind in dict.fromkeys((item["kind"], *(POD_LABELS if trains else ()))):
        existing = cluster.read(kind, item["metadata"]["name"], if_allowed=kind != item["kind"])
        if existing is not None:
            return {**existing, "kind": kind}
    return None


def show_logs(settings: PipelineSettings, step: str | None, cluster: Cluster, show: Callable[[str], None]) -> int:
    """Show the logs of the pods of one step, or of all steps, line by line.

    Args:
        settings: The settings of the pipeline.
        step: The name of the step, or None for all steps.
        cluster: The namespace of the pipeline.
        show: Called with each line.

    Returns:
        The number of pods whose logs were shown.

    Raises:
        InputError: There is no such step, or none of its pods has started.
    """
    cluster.check_namespace()
    steps = render(settings).steps
    if step is not None and step not in steps:
        raise InputError(f"--step {step}: no such step; steps are {', '.join(steps)}")
    shown = 0
    for name, item in steps.items():
        if step not in (None, name):
            continue
        submitted = _find_submitted(cluster, item)
        for pod in pods_of(cluster, submitted) if submitted is not None and is_own(settings, submitted) else ():
            container = followed_container(pod)
            if container is not None and pod.get("status", {}).get("phase") != "Pending":
                shown += 1
                for line in cluster.log_lines(pod["metadata"]["name"], container, follow=False):
                    show(f"[{pod['metadata']['name']}] {RANK_TAG.sub('', line.partition(' ')[2])}")
    if not shown:
        raise InputError(f"no pod of {step or settings.name} has started in namespace {cluster.namespace}; see `k8s status`")
    return shown


def delete(settings: PipelineSettings, cluster: Cluster, *, data: bool) -> list[str]:
    """Delete all Jobs of the pipeline and the objects that they share.

    Objects that belong to somebody else are not deleted, even if they have the same names. The Jobs are deleted first, so
    that they are gone even if the object store then rejects a request.

    Args:
        settings: The settings of the pipeline.
        cluster: The namespace of the pipeline.
        data: Whether to delete the work folder as well, which is a volume claim or a folder in an object store.

    Returns:
        The deleted objects, each as `Kind name`.

    Raises:
        InputError: `data` is set, and the claim of the work folder was created by the user or is mounted by pods of somebody
            else. Nothing was deleted.
    """
    cluster.check_namespace()
    if data and settings.kubernetes.store is None:
        _check_claim_can_go(settings, cluster)
    used = {"ConfigMap", *(item["kind"] for item in render(settings).steps.values())}
    # ConfigMaps that were applied by kubectl have a digest in their name, so search by labels instead of names.
    items = [
        (kind, item)
        for kind in (*reversed(POD_LABELS), "ConfigMap")
        for item in cluster.find(kind, own_selector(settings), if_allowed=kind not in used)
        if is_own(settings, item)
    ]
    for kind, name in _SHARED.items():
        item = cluster.read(kind, f"{settings.name}-{name}", if_allowed=True)
        if item is not None and (kind != "PersistentVolumeClaim" or data) and is_own(settings, item):
            items.append((kind, item))
    names = [(kind, item["metadata"]["name"]) for kind, item in items]
    removed = [f"{kind} {name}" for kind, name in names if cluster.delete(kind, name)]
    if data and settings.kubernetes.store:
        # Delete only the objects below the work folder of this pipeline, and nothing else in the bucket.
        objects, url = ObjectStore(settings.store), f"{settings.kubernetes.store}/{settings.name}"
        urls = [f"{url}/{name}" for name in objects.list(url)]
        with ThreadPoolExecutor(settings.store.connections) as pool:
            for _ in pool.map(objects.remove, urls):
                pass
        removed += [f"{len(urls):,} objects below {url}"] if urls else []
    return removed


def _check_claim_can_go(settings: PipelineSettings, cluster: Cluster) -> None:
    """Check that the claim of the work folder may be deleted.

    A claim that is deleted while pods mount it stays `Terminating` until the last of these pods ends, and meanwhile no new
    pod can mount it.

    Raises:
        InputError: The user created the claim, or it is mounted by pods that `delete` does not delete.
    """
    name = work_claim_name(settings)
    claim = cluster.read("PersistentVolumeClaim", name)
    if claim is None:
        return
    if settings.kubernetes.work_claim or not is_own(settings, claim):
        raise InputError(
            f"claim {name} in namespace {cluster.namespace} is your own: the pipeline did not create it, and does not "
            "remove it; run `gaudi-bert k8s delete` without --data"
        )

    def mounts(pod: Json) -> bool:
        """Return whether a pod or a pod template mounts the claim. A pod that has ended does not count."""
        is_over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        volumes = pod["spec"].get("volumes") or ()
        return not is_over and any(each.get("persistentVolumeClaim", {}).get("claimName") == name for each in volumes)

    deployments = [each for each in cluster.find("Deployment", if_allowed=True) if mounts(each["spec"]["template"])]
    users = {f"deployment {each['metadata']['name']}" for each in deployments}
    users |= {_owner_of(pod) for pod in cluster.find("Pod") if mounts(pod) and not is_own(settings, pod)}
    if users:
        remove = f"kubectl delete --namespace {cluster.namespace} {min(users)}"
        raise InputError(
            f"claim {name} is mounted by {', '.join(sorted(users))}, which `k8s delete` does not remove; remove that first "
            f"({remove}; all of a served model: kubectl delete -k on its folder), or run without --data"
        )


def _owner_of(pod: Json) -> str:
    """Return the kind and name of the object that a user must delete so that a pod is not created again.

    This is the owner of the pod, or the pod itself if it has no owner.
    """
    owner = next(iter(pod["metadata"].get("ownerReferences") or ()), {"kind": "Pod", "name": pod["metadata"]["name"]})
    if owner["kind"] == "ReplicaSet":  # a Deployment creates it, with the name of the Deployment and a digest
        return f"deployment {owner['name'].rpartition('-')[0]}"
    return f"{owner['kind'].lower()} {owner['name']}"
