"""All objects of a pipeline: what `--on kubernetes` submits, `--render` writes, and `k8s/overlays/` holds for the demo.

One function builds each kind of object from the pipeline file, and `pods.py` the pods in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import is_in_store
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.pods import (
    APP_LABELS,
    DATA_FOLDER,
    PIPELINE_LABEL,
    STEP_LABEL,
    USER_NAME_FILE,
    Manifest,
    launcher_pod,
    needs_user_name,
    own_labels,
    pod_specs,
    stage_pod,
    worker_pod,
)
from gaudi_bert.runners.stage_table import STEPS, named_paths, quantity_value, stages_of, steps_of

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
# The first version of Kubernetes in which podFailurePolicy and backoffLimitPerIndex are on by default.
_FAILURE_POLICY_SINCE = (1, 29)
# What a step may be, and the label by which the pods of each are selected.
POD_LABELS = {
    "Job": "job-name",
    "MPIJob": "training.kubeflow.org/job-name",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
}
_TRAINING_KINDS = {"job": "Job", "mpijob": "MPIJob", "trainjob": "TrainJob"}
_TRAINER = "trainer.kubeflow.org"
# Paths that mean the same inside every container.
_MOUNTED = (DATA_FOLDER, "/work")
_RETRIES, _TRAINING_RETRIES = 3, 10
# A pod that was evicted or preempted costs no retry, one that refuses its input (exit code 2) is not tried again, one that
# stopped on request (75) is.
_FAILURE_RULES = (
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}},
    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
)


@dataclass(frozen=True)
class Manifests:
    """All objects of a pipeline.

    The Namespace is the cluster's, not the pipeline's; `shared` is what the steps need, in the order in which it is created;
    `steps` are Jobs, MPIJobs and TrainJobs in the pipeline's order.
    """

    namespace: Manifest
    shared: tuple[Manifest, ...]
    steps: dict[str, Manifest]

    def of_kind(self, kind: str) -> list[Manifest]:
        """Return what the steps share of one kind."""
        return [item for item in self.shared if item["kind"] == kind]

    def pod_specs(self, step: str) -> list[Manifest]:
        """Return the pod specs of a step; those of a TrainJob are in its runtime."""
        item = self.steps[step]
        with_pods = self.of_kind("TrainingRuntime") if item["kind"] == "TrainJob" else [item]
        return [spec for each in with_pods for spec in pod_specs(each)]


def render(settings: PipelineSettings, server_version: tuple[int, int] | None = None) -> Manifests:
    """Build the objects for a cluster of `server_version`; None for `kubernetes.version`."""
    check_paths(settings)
    policy = settings.kubernetes.failure_policy
    if policy == "auto":
        policy = (server_version or settings.kubernetes.version_numbers) >= _FAILURE_POLICY_SINCE
    shared, steps = _shared_objects(settings), {}
    builders = {"Job": _job, "MPIJob": _mpijob, "TrainJob": _trainjob}
    for step in steps_of(stages_of(settings)):
        kind = _TRAINING_KINDS[settings.training_kind] if step == "train" else "Job"
        if kind == "TrainJob":
            shared.append(_training_runtime(settings, policy))
        steps[step] = builders[kind](settings, step, policy)
    metadata = {"name": settings.kubernetes.namespace, "labels": dict(APP_LABELS)}
    return Manifests({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}, tuple(shared), steps)


def own_selector(settings: PipelineSettings) -> str:
    """Return the label selector of the objects of a pipeline."""
    return f"app.kubernetes.io/managed-by={APP_LABELS['app.kubernetes.io/managed-by']},{PIPELINE_LABEL}={settings.name}"


def is_own(settings: PipelineSettings, item: Manifest) -> bool:
    """Return whether an object on the cluster belongs to the pipeline: its name and both labels of `own_selector` say so."""
    metadata = item["metadata"]
    labels = metadata.get("labels") or {}
    named = [f"{key}={labels.get(key)}" for key in ("app.kubernetes.io/managed-by", PIPELINE_LABEL)]
    return metadata["name"].startswith(f"{settings.name}-") and ",".join(named) == own_selector(settings)


def check_paths(settings: PipelineSettings) -> None:
    """Refuse paths that no container has, whatever the cluster."""
    if settings.finetunes and settings.kubernetes.store:
        raise InputError(
            f"kubernetes.store = {settings.kubernetes.store}: the stages finetune and predict have their work folder on "
            "a volume; leave it out (rows and weights may be URLs)"
        )
    for key, path in named_paths(settings):
        if is_in_store(path):
            continue
        if not any(PurePosixPath(path).is_relative_to(folder) for folder in _MOUNTED):
            raise InputError(
                f"{key} = {path}: no such path in a container; put it on a volume, name that volume's claim in "
                f"kubernetes.data_claim, and write the path as {DATA_FOLDER}/..."
            )
        if PurePosixPath(path).is_relative_to(DATA_FOLDER) and not settings.kubernetes.data_claim:
            raise InputError(f"{key} = {path}: needs a volume at {DATA_FOLDER}; name its claim in kubernetes.data_claim")


def _object(
    settings: PipelineSettings, kind: str, name: str, *, api: str = "v1", step: str | None = None, **content: Any
) -> Manifest:
    """An object of the pipeline in its namespace, with the labels by which it is known as the pipeline's own."""
    labels = {**own_labels(settings), "app.kubernetes.io/instance": settings.name, **({STEP_LABEL: step} if step else {})}
    if step and settings.kubernetes.queue:
        # Not on the pods: each would be queued by itself. And not suspended here: without a queue nobody would resume it.
        labels[QUEUE_LABEL] = settings.kubernetes.queue
    metadata = {"name": f"{settings.name}-{name}", "namespace": settings.kubernetes.namespace, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


# --- what the steps share


def _shared_objects(settings: PipelineSettings) -> list[Manifest]:
    kubernetes = settings.kubernetes
    # An account without rights: stages read and write files only.
    shared = [_object(settings, "ServiceAccount", "stages", automountServiceAccountToken=False)]
    if not (kubernetes.work_claim or kubernetes.store):
        storage_class = {"storageClassName": kubernetes.storage_class} if kubernetes.storage_class else {}
        size = {"requests": {"storage": kubernetes.storage}}
        claim = {"accessModes": [kubernetes.access_mode], "resources": size, **storage_class}
        shared.append(_object(settings, "PersistentVolumeClaim", "work", spec=claim))
    shared.append(_configuration(settings))
    pods = {POD_LABELS[_TRAINING_KINDS[settings.training_kind]]: f"{settings.name}-train"}
    if settings.needs_service:
        # Names for the pods that meet, also for those that are not ready: they are, when they have met.
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": pods}
        shared.append(_object(settings, "Service", "train", spec=service))
    if settings.has_network_policy:
        # Only pods that train together reach one another, where the cluster's network enforces policies.
        selected = {"podSelector": {"matchLabels": pods}}
        policy = {**selected, "policyTypes": ["Ingress"], "ingress": [{"from": [selected]}]}
        shared.append(_object(settings, "NetworkPolicy", "train", api="networking.k8s.io/v1", spec=policy))
    return shared


def _configuration(settings: PipelineSettings) -> Manifest:
    values = settings.model_dump(mode="json", exclude_unset=True)  # so that it reads like the file
    # Packed shards may take at most half of a training pod's scratch.
    half_scratch = int(quantity_value(settings.kubernetes.scratch)) // 2
    if settings.kubernetes.store and half_scratch < settings.store.cache_bytes:
        values["store"] = {**values.get("store", {}), "cache_bytes": half_scratch}
    data = {"pipeline.yaml": yaml.safe_dump(values, sort_keys=False, default_flow_style=None)}
    if needs_user_name(settings):
        user = settings.kubernetes.user
        data[USER_NAME_FILE] = f"gaudi-bert:x:{user}:{user}::/tmp:/bin/sh\n"
    return _object(settings, "ConfigMap", "pipeline", data=data)


# --- the steps


def _job(settings: PipelineSettings, step: str, policy: bool) -> Manifest:
    spec = {"ttlSecondsAfterFinished": settings.kubernetes.keep_seconds, **_job_spec(settings, step, policy)}
    spec["template"] = stage_pod(settings, step)
    return _object(settings, "Job", step, api="batch/v1", step=step, spec=spec)


def _job_spec(settings: PipelineSettings, step: str, policy: bool) -> Manifest:
    """The number of pods of a Job, and their retries; `policy`: whether the cluster knows why a pod ended."""
    stage = STEPS[step]
    shared_out = stage.shared and step == stage.name
    pods, spec = 1, {}
    if shared_out or (step == "train" and settings.trains_on_nodes):
        pods = settings.resources.data_workers if shared_out else settings.resources.workers
        spec = {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
    # A Job of several pods counts their retries together, and all of those that train together end when one is lost.
    retries = _TRAINING_RETRIES if stage.distributed else _RETRIES
    if not policy:
        return {**spec, "backoffLimit": retries * pods}
    limit = {"backoffLimitPerIndex": retries} if shared_out else {"backoffLimit": retries * pods}
    # A pod is replaced when it has ended, so that no two of them do the same.
    return {**spec, **limit, "podReplacementPolicy": "Failed", "podFailurePolicy": {"rules": list(_FAILURE_RULES)}}


def _mpijob(settings: PipelineSettings, step: str, policy: bool) -> Manifest:
    """One launcher starts `slotsPerWorker` processes on each worker by ssh; workers keep sshd running and wait."""
    resources = settings.resources
    spec = {
        "slotsPerWorker": resources.processes_per_worker,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "mpiImplementation": "OpenMPI",
        # The vendor's software runs as root, and so does sshd, with the keys where root's are looked for.
        "sshAuthMountPath": "/root/.ssh" if resources.cards else "/etc/gaudi-bert-ssh",
        "runPolicy": {
            "backoffLimit": _TRAINING_RETRIES,
            "cleanPodPolicy": "Running",
            "ttlSecondsAfterFinished": settings.kubernetes.keep_seconds,
            # Under a gang scheduler, the launcher must not be waited for: it is created when the workers are ready.
            "schedulingPolicy": {"minAvailable": resources.workers},
        },
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher_pod(settings)},
            "Worker": {"replicas": resources.workers, "restartPolicy": "OnFailure", "template": worker_pod(settings)},
        },
    }
    return _object(settings, "MPIJob", step, api="kubeflow.org/v2beta1", step=step, spec=spec)


# A TrainJob of Kubeflow Trainer has the number of pods, a TrainingRuntime their template. Trainer makes a JobSet of them,
# and sets the variables by which they meet in the container `node`.


def _trainjob(settings: PipelineSettings, step: str, policy: bool) -> Manifest:
    resources = settings.resources
    spec = {
        "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": f"{settings.name}-train"},
        "trainer": {"numNodes": resources.workers, "numProcPerNode": resources.processes_per_worker},
    }
    return _object(settings, "TrainJob", step, api=f"{_TRAINER}/v1alpha1", step=step, spec=spec)


def _training_runtime(settings: PipelineSettings, policy: bool) -> Manifest:
    spec = _job_spec(settings, "train", policy)
    for key in ("completions", "parallelism", "completionMode"):
        del spec[key]
    spec["template"] = stage_pod(settings, "train", by_trainer=True)
    node = {"metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}, "spec": spec}
    content = {
        "mlPolicy": {"numNodes": settings.resources.workers, "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": node}]}},
    }
    runtime = _object(settings, "TrainingRuntime", "train", api=f"{_TRAINER}/v1alpha1", step="train", spec=content)
    runtime["metadata"]["labels"][f"{_TRAINER}/framework"] = "torch"
    return runtime
