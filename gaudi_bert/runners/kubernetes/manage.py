"""Show or delete the objects of a pipeline on a cluster, for `gaudi-bert k8s status`, `k8s logs` and `k8s delete`.

Only objects that have the labels of the pipeline are shown and deleted. An object of somebody else that has the same name is
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
from gaudi_bert.runners.kubernetes.follow import select_container_for_logs
from gaudi_bert.runners.kubernetes.manifests import POD_LABELS, build_manifests, is_pipeline_object, pipeline_label_selector
from gaudi_bert.runners.kubernetes.pods import STEP_LABEL, Manifest, work_claim_name
from gaudi_bert.runners.kubernetes.reasons import (
    find_step_problem,
    find_suspension_problem,
    is_suspended,
    list_job_pods,
    read_job_outcome,
    select_newest_pods,
)
from gaudi_bert.runners.kubernetes.run import foreign_object_error
from gaudi_bert.runners.training_processes import RANK_TAG

# The status of a step as a JSON object. The docstring of `read_step_statuses` lists its keys.
StepStatus = dict[str, Any]
# The kinds of the objects that the steps of a pipeline share, and the suffixes of the objects' names. `delete` looks for all
# kinds, because earlier settings of the pipeline may have created other objects than the current settings.
_SHARED_NAME_SUFFIXES = {
    "ServiceAccount": "stages",
    "PersistentVolumeClaim": "work",
    "Service": "train",
    "NetworkPolicy": "train",
    "TrainingRuntime": "train",
}


def read_step_statuses(settings: PipelineSettings, cluster: Cluster) -> dict[str, StepStatus]:
    """Return the status of each step of a pipeline on the cluster.

    Returns:
        For each step a dictionary. Its `state` is `not submitted`, `suspended`, `waiting`, `running`, `complete` or
        `failed: <reason>`. For a submitted step, `pods` maps each pod phase to the number of pods in it, without pods that
        were replaced. `problem` states what is wrong or what the step waits for, and is None if there is no problem.

    Raises:
        InputError: The namespace does not exist, or pods cannot read a path of the pipeline.
        ClusterError: The cluster rejected a request or does not answer.
    """
    cluster.check_namespace()
    return {step: _read_step_status(settings, cluster, item) for step, item in build_manifests(settings).steps.items()}


def format_step_statuses(statuses: Mapping[str, StepStatus]) -> list[str]:
    """Format the result of `read_step_statuses` as lines of text."""
    lines = []
    for step, status in statuses.items():
        pods = ", ".join(f"{count} {phase}" for phase, count in status.get("pods", {}).items())
        lines.append(f"{step}: {status['state']}" + (f" ({pods})" if pods else ""))
        lines += [f"  {status['problem']}"] if status.get("problem") else []
    return lines


def _read_step_status(settings: PipelineSettings, cluster: Cluster, job: Manifest) -> StepStatus:
    """Return the status of one step. `read_step_statuses` describes the format."""
    submitted = _find_submitted_job(cluster, job)
    if submitted is None:
        return {"state": "not submitted"}
    if not is_pipeline_object(settings, submitted):
        return {"state": "not submitted", "problem": str(foreign_object_error(settings, submitted, submitted["kind"]))}
    pods, outcome = list_job_pods(cluster, submitted), read_job_outcome(submitted)
    phases = [pod.get("status", {}).get("phase", "Unknown") for pod in select_newest_pods(pods)]
    state, problem = outcome or ("running" if "Running" in phases else "waiting"), None
    if outcome is None and is_suspended(submitted):
        state, problem = "suspended", str(find_suspension_problem(cluster, submitted))
    elif outcome != "complete":
        reported = find_step_problem(cluster, submitted, pods)
        problem = None if reported is None else str(reported)
    return {"state": state, "pods": {phase: phases.count(phase) for phase in sorted(set(phases))}, "problem": problem}


def _find_submitted_job(cluster: Cluster, job: Manifest) -> Manifest | None:
    """Find the object on the cluster that has the same name as a step's Job. Return None if there is no such object.

    The object may belong to somebody else. Earlier settings may have run the step `train` as a Job, an MPIJob or a TrainJob,
    so all three kinds are searched for this step.
    """
    trains = job["metadata"]["labels"][STEP_LABEL] == "train"
    for kind in dict.fromkeys((job["kind"], *(POD_LABELS if trains else ()))):
        existing = cluster.read_object(kind, job["metadata"]["name"], none_if_forbidden=kind != job["kind"])
        if existing is not None:
            return {**existing, "kind": kind}
    return None


def show_logs(settings: PipelineSettings, step: str | None, cluster: Cluster, print_line: Callable[[str], None]) -> int:
    """Show the logs of all pods of one step or of all steps, line by line.

    Args:
        settings: The settings of the pipeline.
        step: The name of the step, or None for all steps.
        cluster: The client for the namespace of the pipeline.
        print_line: Called with each line.

    Returns:
        The number of pods whose logs were shown.

    Raises:
        InputError: There is no such step, or none of its pods has started.
    """
    cluster.check_namespace()
    steps = build_manifests(settings).steps
    if step is not None and step not in steps:
        raise InputError(f"--step {step}: unknown step; choose one of {', '.join(steps)}")
    shown = 0
    for name, job in steps.items():
        if step not in (None, name):
            continue
        submitted = _find_submitted_job(cluster, job)
        for pod in (
            list_job_pods(cluster, submitted) if submitted is not None and is_pipeline_object(settings, submitted) else ()
        ):
            container = select_container_for_logs(pod)
            if container is not None and pod.get("status", {}).get("phase") != "Pending":
                shown += 1
                for line in cluster.read_log_lines(pod["metadata"]["name"], container, follow=False):
                    print_line(f"[{pod['metadata']['name']}] {RANK_TAG.sub('', line.partition(' ')[2])}")
    if not shown:
        raise InputError(
            f"no pod of {step or settings.name} has started in namespace {cluster.namespace}; see `gaudi-bert k8s status`"
        )
    return shown


def delete_pipeline_objects(settings: PipelineSettings, cluster: Cluster, *, delete_data: bool) -> list[str]:
    """Delete all Jobs of a pipeline and the objects that its steps share.

    Objects that belong to somebody else are not deleted, even if they have the same names. The Jobs are deleted before the
    data, so that they are gone even if the object store rejects a request.

    Args:
        settings: The settings of the pipeline.
        cluster: The client for the namespace of the pipeline.
        delete_data: Whether to delete the work folder too, which is a volume claim or a folder in an object store.

    Returns:
        The deleted objects, each as `Kind name`.

    Raises:
        InputError: `delete_data` is set, but the user created the claim of the work folder, or pods of somebody else mount
            it. Nothing was deleted.
    """
    cluster.check_namespace()
    if delete_data and settings.kubernetes.store is None:
        _check_claim_is_deletable(settings, cluster)
    used = {"ConfigMap", *(item["kind"] for item in build_manifests(settings).steps.values())}
    # If the pipeline was applied with kubectl, its ConfigMap has a digest in its name. So search by labels and not by names.
    items = [
        (kind, item)
        for kind in (*reversed(POD_LABELS), "ConfigMap")
        for item in cluster.list_objects(kind, pipeline_label_selector(settings), empty_if_forbidden=kind not in used)
        if is_pipeline_object(settings, item)
    ]
    for kind, name in _SHARED_NAME_SUFFIXES.items():
        item = cluster.read_object(kind, f"{settings.name}-{name}", none_if_forbidden=True)
        if item is not None and (kind != "PersistentVolumeClaim" or delete_data) and is_pipeline_object(settings, item):
            items.append((kind, item))
    removed = [
        f"{kind} {item['metadata']['name']}" for kind, item in items if cluster.delete_object(kind, item["metadata"]["name"])
    ]
    if delete_data and settings.kubernetes.store:
        # Other pipelines may use the same bucket, so delete only the objects below the work folder of this pipeline.
        objects, url = ObjectStore(settings.store), f"{settings.kubernetes.store}/{settings.name}"
        urls = [f"{url}/{name}" for name in objects.list(url)]
        with ThreadPoolExecutor(settings.store.connections) as pool:
            for _ in pool.map(objects.remove, urls):
                pass
        removed += [f"{len(urls):,} objects below {url}"] if urls else []
    return removed


def _check_claim_is_deletable(settings: PipelineSettings, cluster: Cluster) -> None:
    """Check that the volume claim of the work folder may be deleted.

    If a claim is deleted while pods mount it, it stays `Terminating` until the last of these pods ends. Meanwhile no new pod
    can mount it.

    Raises:
        InputError: The user created the claim, or it is mounted by pods that `delete` does not delete.
    """
    name = work_claim_name(settings)
    claim = cluster.read_object("PersistentVolumeClaim", name)
    if claim is None:
        return
    if settings.kubernetes.work_claim or not is_pipeline_object(settings, claim):
        raise InputError(
            f"claim {name} in namespace {cluster.namespace} was not created by this pipeline, so it is not deleted; "
            "run `gaudi-bert k8s delete` without --data"
        )

    def is_mounting_claim(pod: Json) -> bool:
        """Return whether a pod or a pod template mounts the volume claim. Return False for a pod that has ended."""
        is_over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        volumes = pod["spec"].get("volumes") or ()
        return not is_over and any(each.get("persistentVolumeClaim", {}).get("claimName") == name for each in volumes)

    deployments = [
        each
        for each in cluster.list_objects("Deployment", empty_if_forbidden=True)
        if is_mounting_claim(each["spec"]["template"])
    ]
    users = {f"deployment {each['metadata']['name']}" for each in deployments}
    users |= {
        _format_pod_owner(pod)
        for pod in cluster.list_objects("Pod")
        if is_mounting_claim(pod) and not is_pipeline_object(settings, pod)
    }
    if users:
        remove = f"kubectl delete --namespace {cluster.namespace} {min(users)}"
        raise InputError(
            f"claim {name} is mounted by {', '.join(sorted(users))}, which `gaudi-bert k8s delete` does not delete; first "
            f"run `{remove}` (for a served model: `kubectl delete -k FOLDER`), or omit --data"
        )


def _format_pod_owner(pod: Json) -> str:
    """Return the kind and the name of the object that a user must delete so that a pod is removed for good.

    This is the owner of the pod, because the owner would create the pod again. If the pod has no owner, it is the pod.
    """
    owner = next(iter(pod["metadata"].get("ownerReferences") or ()), {"kind": "Pod", "name": pod["metadata"]["name"]})
    if owner["kind"] == "ReplicaSet":  # a Deployment creates it, with the name of the Deployment and a digest
        return f"deployment {owner['name'].rpartition('-')[0]}"
    return f"{owner['kind'].lower()} {owner['name']}"
