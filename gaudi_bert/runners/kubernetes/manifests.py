"""Build the Kubernetes objects of a pipeline from its settings, and write them to a folder for `kubectl apply -k`.

`build_manifests` returns all objects of a pipeline. `gaudi-bert run --on kubernetes` submits them, and `write_manifests`
writes them to files for `gaudi-bert run --render`. The folder `k8s/overlays/` contains the files of the demo pipeline. Each
kind of object has its own function here, and `pods.py` builds the pods in the objects. This module does not communicate with
a cluster.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import hash_json, is_in_store, read_file, write_text
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.pods import (
    APP_LABELS,
    DATA_FOLDER,
    PIPELINE_LABEL,
    STEP_LABEL,
    USER_NAME_FILE,
    Manifest,
    build_launcher_pod_template,
    build_stage_pod_template,
    build_worker_pod_template,
    iterate_pod_specs,
    needs_passwd_file,
    pipeline_labels,
)
from gaudi_bert.runners.kubernetes.work_claim import check_volume_access_mode
from gaudi_bert.runners.stage_table import (
    KUSTOMIZATIONS,
    STAGES,
    STEPS,
    list_input_paths,
    list_pipeline_stages,
    list_steps_of_stages,
    parse_quantity,
)

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
# From this Kubernetes version on, podFailurePolicy and backoffLimitPerIndex are enabled by default.
_FAILURE_POLICY_SINCE = (1, 29)
# The kinds of objects that can run a step, and the label that each of their pods has. The value of the label is the object's
# name.
POD_LABELS = {
    "Job": "job-name",
    "MPIJob": "training.kubeflow.org/job-name",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
}
_TRAINING_KINDS = {"job": "Job", "mpijob": "MPIJob", "trainjob": "TrainJob"}
_TRAINER = "trainer.kubeflow.org"
# In every container, volumes are mounted at these paths.
_MOUNTED_FOLDERS = (DATA_FOLDER, "/work")
_RETRIES, _TRAINING_RETRIES = 3, 10
# A pod that was evicted, preempted or stopped on request (exit code 75) is replaced without counting as a retry. If a pod
# rejects its input (exit code 2), a retry cannot help, so the Job fails at once.
_FAILURE_RULES = (
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}},
    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
)


@dataclass(frozen=True)
class Manifests:
    """The manifests of all Kubernetes objects of a pipeline.

    Attributes:
        namespace: The Namespace. It is only written by `--render`, because a run does not create it.
        shared: The objects that the steps share, in the order of their creation.
        steps: The Job, MPIJob or TrainJob of each step, in the order of the pipeline.
    """

    namespace: Manifest
    shared: tuple[Manifest, ...]
    steps: dict[str, Manifest]

    def list_objects_shared_by_steps(self, kind: str) -> list[Manifest]:
        """Return the objects of one kind that all steps share."""
        return [item for item in self.shared if item["kind"] == kind]

    def pod_specs_of_step(self, step: str) -> list[Manifest]:
        """Return the specs of all pods that run a step."""
        # A TrainJob contains no pod specs, so use those of its TrainingRuntime.
        item = self.steps[step]
        with_pods = self.list_objects_shared_by_steps("TrainingRuntime") if item["kind"] == "TrainJob" else [item]
        return [spec for each in with_pods for spec in iterate_pod_specs(each)]


def build_manifests(settings: PipelineSettings, server_version: tuple[int, int] | None = None) -> Manifests:
    """Build all Kubernetes objects of a pipeline from its settings.

    Args:
        settings: The settings of the pipeline.
        server_version: The Kubernetes version of the cluster (major, minor). If it is None, `kubernetes.version` is used.

    Raises:
        InputError: The pipeline names files that pods cannot read.
    """
    check_pods_can_read_files(settings)
    use_failure_policy = settings.kubernetes.failure_policy
    if use_failure_policy == "auto":
        use_failure_policy = (server_version or settings.kubernetes.version_tuple) >= _FAILURE_POLICY_SINCE
    shared, steps = _build_objects_shared_by_steps(settings), {}
    builders = {"Job": _build_job, "MPIJob": _build_mpijob, "TrainJob": _build_trainjob}
    for step in list_steps_of_stages(list_pipeline_stages(settings)):
        kind = _TRAINING_KINDS[settings.training_object_kind] if step == "train" else "Job"
        if kind == "TrainJob":
            shared.append(_build_training_runtime(settings, use_failure_policy))
        steps[step] = builders[kind](settings, step, use_failure_policy)
    metadata = {"name": settings.kubernetes.namespace, "labels": dict(APP_LABELS)}
    return Manifests({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}, tuple(shared), steps)


def pipeline_label_selector(settings: PipelineSettings) -> str:
    """Return the Kubernetes label selector for the objects of a pipeline."""
    return f"app.kubernetes.io/managed-by={APP_LABELS['app.kubernetes.io/managed-by']},{PIPELINE_LABEL}={settings.name}"


def is_pipeline_object(settings: PipelineSettings, kubernetes_object: Manifest) -> bool:
    """Return whether an object on the cluster belongs to the pipeline.

    The name of such an object begins with the name of the pipeline, and it has both labels of `pipeline_label_selector`.
    """
    metadata = kubernetes_object["metadata"]
    wanted = {"app.kubernetes.io/managed-by": APP_LABELS["app.kubernetes.io/managed-by"], PIPELINE_LABEL: settings.name}
    return metadata["name"].startswith(f"{settings.name}-") and wanted.items() <= (metadata.get("labels") or {}).items()


def check_pods_can_read_files(settings: PipelineSettings) -> None:
    """Check that pods can read all input files of a pipeline.

    Raises:
        InputError: A path is not on a volume, the settings do not name the claim of this volume, or a pipeline that
            fine-tunes has its work folder in an object store.
    """
    if settings.has_finetuning and settings.kubernetes.store:
        raise InputError(
            f"kubernetes.store = {settings.kubernetes.store}: the stages finetune and predict need a work folder on a "
            "volume; omit kubernetes.store (rows and weights may be URLs)"
        )
    for key, path in list_input_paths(settings):
        if is_in_store(path):
            continue
        if not any(PurePosixPath(path).is_relative_to(folder) for folder in _MOUNTED_FOLDERS):
            raise InputError(
                f"{key} = {path}: this path does not exist in a container; put the file on a volume, set "
                f"kubernetes.data_claim to the claim of that volume, and write the path as {DATA_FOLDER}/..."
            )
        if PurePosixPath(path).is_relative_to(DATA_FOLDER) and not settings.kubernetes.data_claim:
            raise InputError(
                f"{key} = {path}: no volume is mounted at {DATA_FOLDER}; set kubernetes.data_claim to the claim of your "
                "volume"
            )


def _build_object(
    settings: PipelineSettings,
    kind: str,
    name_suffix: str,
    *,
    api_version: str = "v1",
    step: str | None = None,
    **content: Any,
) -> Manifest:
    """Build an object that has the namespace and the labels of a pipeline.

    Args:
        settings: The settings of the pipeline.
        kind: The kind of the object.
        name_suffix: The end of the object's name, which follows the name of the pipeline.
        api_version: The API version.
        step: The name of the step that the object belongs to, or None for shared objects.
        **content: The other top-level fields, such as `spec`.
    """
    labels = {
        **pipeline_labels(settings),
        "app.kubernetes.io/instance": settings.name,
        **({STEP_LABEL: step} if step else {}),
    }
    if step and settings.kubernetes.queue:
        # If the pods also had the queue label, each pod would be queued separately, so only the object gets the label. Do
        # not create the object in the suspended state, because only a queue controller could resume it, and the cluster may
        # have none.
        labels[QUEUE_LABEL] = settings.kubernetes.queue
    metadata = {"name": f"{settings.name}-{name_suffix}", "namespace": settings.kubernetes.namespace, "labels": labels}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


# --- shared objects


def _build_objects_shared_by_steps(settings: PipelineSettings) -> list[Manifest]:
    """Build the objects that the steps of a pipeline share, and return them in creation order."""
    kubernetes = settings.kubernetes
    # Stages send no requests to the cluster, so their pods do not need the token of the service account.
    shared = [_build_object(settings, "ServiceAccount", "stages", automountServiceAccountToken=False)]
    if not (kubernetes.work_claim or kubernetes.store):
        storage_class = {"storageClassName": kubernetes.storage_class} if kubernetes.storage_class else {}
        size = {"requests": {"storage": kubernetes.storage}}
        claim = {"accessModes": [kubernetes.access_mode], "resources": size, **storage_class}
        shared.append(_build_object(settings, "PersistentVolumeClaim", "work", spec=claim))
    shared.append(_build_config_map(settings))
    pods = {POD_LABELS[_TRAINING_KINDS[settings.training_object_kind]]: f"{settings.name}-train"}
    if settings.needs_headless_service:
        # Training pods connect to each other by the host names of this Service. They become ready only after they have
        # connected, so the Service must also publish pods that are not ready.
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": pods}
        shared.append(_build_object(settings, "Service", "train", spec=service))
    if settings.has_network_policy:
        # No other pod needs to connect to the training pods, so allow only connections between the training pods. Not every
        # cluster network enforces such policies.
        selected = {"podSelector": {"matchLabels": pods}}
        policy = {**selected, "policyTypes": ["Ingress"], "ingress": [{"from": [selected]}]}
        shared.append(_build_object(settings, "NetworkPolicy", "train", api_version="networking.k8s.io/v1", spec=policy))
    return shared


def _build_config_map(settings: PipelineSettings) -> Manifest:
    """Build the ConfigMap that contains the pipeline file, and a passwd file if pods need one."""
    values = settings.model_dump(mode="json", exclude_unset=True)  # without defaults, like the user's pipeline file
    # The cache of packed shards could fill the scratch volume of a pod, so limit it to half of this volume.
    half_scratch = int(parse_quantity(settings.kubernetes.scratch)) // 2
    if settings.kubernetes.store and half_scratch < settings.store.cache_bytes:
        values["store"] = {**values.get("store", {}), "cache_bytes": half_scratch}
    data = {"pipeline.yaml": yaml.safe_dump(values, sort_keys=False, default_flow_style=None)}
    if needs_passwd_file(settings):
        user = settings.kubernetes.user
        data[USER_NAME_FILE] = f"gaudi-bert:x:{user}:{user}::/tmp:/bin/sh\n"
    return _build_object(settings, "ConfigMap", "pipeline", data=data)


# --- the steps


def _build_job(settings: PipelineSettings, step: str, use_failure_policy: bool) -> Manifest:
    """Return the manifest of the Job that runs a step."""
    spec = {
        "ttlSecondsAfterFinished": settings.kubernetes.keep_seconds,
        **_build_pod_count_and_retries(settings, step, use_failure_policy),
        "template": build_stage_pod_template(settings, step),
    }
    return _build_object(settings, "Job", step, api_version="batch/v1", step=step, spec=spec)


def _build_pod_count_and_retries(settings: PipelineSettings, step: str, use_failure_policy: bool) -> Manifest:
    """Build the fields of a Job spec that set the number of pods and the retries of failed pods.

    Args:
        settings: The settings of the pipeline.
        step: The name of the step.
        use_failure_policy: Whether to add a `podFailurePolicy`, which depends on why a pod ended.
    """
    stage = STEPS[step]
    is_sharded = stage.is_shardable and step == stage.name
    pods, spec = 1, {}
    if is_sharded or (step == "train" and settings.training_pods_start_own_processes):
        pods = settings.resources.data_workers if is_sharded else settings.resources.workers
        spec = {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
    # A Job has a single limit for the failures of all its pods. If one training pod is lost, all other training pods also
    # end and count as failures. So multiply the number of retries by the number of pods.
    retries = _TRAINING_RETRIES if stage.is_distributed else _RETRIES
    if not use_failure_policy:
        return {**spec, "backoffLimit": retries * pods}
    limit = {"backoffLimitPerIndex": retries} if is_sharded else {"backoffLimit": retries * pods}
    # With "Failed", a pod is replaced only after it has ended. Otherwise two pods could do the same part of a stage at once.
    return {**spec, **limit, "podReplacementPolicy": "Failed", "podFailurePolicy": {"rules": list(_FAILURE_RULES)}}


def _build_mpijob(settings: PipelineSettings, step: str, use_failure_policy: bool) -> Manifest:
    """Return the manifest of the MPIJob that runs the step `train`.

    Its launcher starts `slotsPerWorker` processes on each worker over ssh. The workers only run sshd.
    """
    resources = settings.resources
    spec = {
        "slotsPerWorker": resources.processes_per_worker,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "mpiImplementation": "OpenMPI",
        # With Gaudi cards, sshd runs as root, as the vendor's software requires, and reads keys from root's home folder.
        "sshAuthMountPath": "/root/.ssh" if resources.cards else "/etc/gaudi-bert-ssh",
        "runPolicy": {
            "backoffLimit": _TRAINING_RETRIES,
            "cleanPodPolicy": "Running",
            "ttlSecondsAfterFinished": settings.kubernetes.keep_seconds,
            # The launcher is created only after the workers are ready. A gang scheduler that also waited for the launcher
            # would wait forever, so tell the scheduler to wait only for the workers.
            "schedulingPolicy": {"minAvailable": resources.workers},
        },
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": build_launcher_pod_template(settings)},
            "Worker": {
                "replicas": resources.workers,
                "restartPolicy": "OnFailure",
                "template": build_worker_pod_template(settings),
            },
        },
    }
    return _build_object(settings, "MPIJob", step, api_version="kubeflow.org/v2beta1", step=step, spec=spec)


# In Kubeflow Trainer, a TrainJob sets the number of pods, and a TrainingRuntime contains the pod template. Trainer creates a
# JobSet from both, and sets the rendezvous variables in the container `node`, so the container must have this name.


def _build_trainjob(settings: PipelineSettings, step: str, use_failure_policy: bool) -> Manifest:
    """Return the manifest of the TrainJob that runs the step `train`.

    `use_failure_policy` is not used here, because the retries are set in the TrainingRuntime.
    """
    resources = settings.resources
    spec = {
        "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": f"{settings.name}-train"},
        "trainer": {"numNodes": resources.workers, "numProcPerNode": resources.processes_per_worker},
    }
    return _build_object(settings, "TrainJob", step, api_version=f"{_TRAINER}/v1alpha1", step=step, spec=spec)


def _build_training_runtime(settings: PipelineSettings, use_failure_policy: bool) -> Manifest:
    """Return the TrainingRuntime that contains the pod template for the TrainJob of a pipeline."""
    spec = _build_pod_count_and_retries(settings, "train", use_failure_policy)
    for key in ("completions", "parallelism", "completionMode"):
        del spec[key]
    spec["template"] = build_stage_pod_template(settings, "train", for_trainjob=True)
    node = {"metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}, "spec": spec}
    content = {
        "mlPolicy": {"numNodes": settings.resources.workers, "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": node}]}},
    }
    api_version = f"{_TRAINER}/v1alpha1"
    runtime = _build_object(settings, "TrainingRuntime", "train", api_version=api_version, step="train", spec=content)
    runtime["metadata"]["labels"][f"{_TRAINER}/framework"] = "torch"
    return runtime


# --- the folder that `--render` writes
#
#     DIR/base       namespace, service account, volume claim, pipeline file, and the objects that training shares
#     DIR/data       Jobs of the stages from prepare to verify
#     DIR/training   the Job, MPIJob or TrainJob that trains
#     DIR/finetuning Jobs of finetune and predict
#     DIR/results    Jobs of evaluate and report
#
# The folders below the base are called parts, and each of them includes the base. `kubectl apply -k DIR` starts all parts.
# With Gaudi cards or a queue, it starts only the first part, so that no cards are reserved before the data are ready. With a
# TrainJob, it also starts only the first part, because Kubeflow Trainer rejects a TrainJob without a TrainingRuntime.

_FIRST_LINE = "# Rendered by `gaudi-bert run --render`; an edit is lost when it is rendered again."


def write_manifests(settings: PipelineSettings, stages: Sequence[str], folder: Path, overwrite: bool = False) -> list[str]:
    """Write the manifests of a pipeline to a folder for `kubectl apply -k`.

    Args:
        settings: The settings of the pipeline.
        stages: The names of the stages whose steps are written.
        folder: The folder. It must be new, empty, or written by an earlier call.
        overwrite: Whether to replace existing manifests that differ from the new ones.

    Returns:
        The names of the parts of the folder. They must be applied in this order.

    Raises:
        InputError: `folder` contains other files, an existing manifest differs and `overwrite` is not set, or several
            workers would share a volume that only one node can mount.
    """
    check_volume_access_mode(settings)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: this is a file and not a folder; choose another path")
    if folder.exists() and any(folder.iterdir()) and not (folder / "kustomization.yaml").exists():
        raise InputError(f"{folder}: the folder contains files that --render did not write; choose another folder")
    files, parts = _build_kustomize_folder(settings, stages)
    texts = {
        folder / name: f"{_FIRST_LINE}\n{yaml.dump(item, Dumper=_ManifestDumper, sort_keys=False, width=120)}"
        for name, item in files.items()
    }
    changed = [path for path, text in texts.items() if os.path.lexists(path) and read_file(path) != text.encode()]
    linked = [path for path in (*texts, *(path.parent for path in texts if path.parent != folder)) if path.is_symlink()]
    foreign = [path for path in changed if not read_file(path).startswith(_FIRST_LINE.encode())]
    if linked or foreign:
        raise InputError(f"{(linked or foreign)[0]}: this file was not written by --render; choose another folder")
    if changed and not overwrite:
        raise InputError(
            f"{changed[0]}: the file differs from the manifest that --render would write, because it was edited or the "
            "settings have changed; choose another folder, or pass --overwrite to replace the file"
        )
    for path, text in texts.items():
        write_text(path, text)
    return parts


class _KustomizeFolder(NamedTuple):
    """The content of a folder for `kubectl apply -k`.

    Attributes:
        files: The content of each file, by its path relative to the folder.
        parts: The names of the subfolders. They must be applied in this order.
    """

    files: dict[str, Manifest]
    parts: list[str]


def _build_kustomize_folder(settings: PipelineSettings, stages: Sequence[str]) -> _KustomizeFolder:
    """Build the content of the folder that `write_manifests` writes."""
    manifests = _add_digest_to_config_map_name(build_manifests(settings))
    base = {f"{item['kind'].lower()}.yaml": item for item in (manifests.namespace, *manifests.shared)}
    files = _build_kustomization("base", base, [])
    parts: dict[str, list[str]] = {}
    for part in KUSTOMIZATIONS:
        steps = list_steps_of_stages(name for name in stages if STAGES[name].kustomization == part)
        if steps:
            files |= _build_kustomization(part, {f"{step}.yaml": manifests.steps[step] for step in steps}, ["../base"])
            parts[part] = [f"{part}/{step}.yaml" for step in steps]
    base_first = bool(manifests.list_objects_shared_by_steps("TrainingRuntime"))
    together = list(parts)
    if settings.resources.cards or settings.kubernetes.queue or base_first:
        together = [part for part in parts if not (base_first and part == "training")][:1]
    # Each sub-folder includes the Kustomize folder `base`, and Kustomize rejects a folder that includes `base` twice. So the
    # top folder lists the files in the sub-folders, and not the sub-folders themselves.
    files |= _build_kustomization("", {}, ["base", *(file for part in together for file in parts[part])])
    return _KustomizeFolder(files, [*(["base"] if base_first else []), *parts])


def _add_digest_to_config_map_name(manifests: Manifests) -> Manifests:
    """Copy the manifests, append a digest of the ConfigMap's content to its name, and return the copy.

    If the pipeline file changes, the digest changes the pod templates of the Jobs. `kubectl apply` rejects such a change,
    because Jobs are immutable. Without the digest, it would silently keep the Jobs of the old pipeline.
    """
    renamed = copy.deepcopy(manifests)
    (configuration,) = renamed.list_objects_shared_by_steps("ConfigMap")
    configuration["metadata"]["name"] += f"-{hash_json(configuration['data'])[:10]}"
    for step in renamed.steps:
        for spec in renamed.pod_specs_of_step(step):
            for volume in spec["volumes"]:
                if "configMap" in volume:
                    volume["configMap"]["name"] = configuration["metadata"]["name"]
    return renamed


def _build_kustomization(
    folder_name: str, manifests_by_file: dict[str, Manifest], other_resources: Sequence[str]
) -> dict[str, Manifest]:
    """Return the files of one Kustomize folder as a dictionary from paths to manifests. It includes the `kustomization.yaml`
    that lists the other files.

    Args:
        folder_name: The name of the folder, or "" for the top folder.
        manifests_by_file: The manifests of the folder, by file name.
        other_resources: Further files and folders, which `kustomization.yaml` lists before the manifests.
    """
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    kustomization = {**head, "resources": [*other_resources, *manifests_by_file]}
    return {
        str(PurePosixPath(folder_name, name)): item
        for name, item in {**manifests_by_file, "kustomization.yaml": kustomization}.items()
    }


class _ManifestDumper(yaml.SafeDumper):
    """Writes YAML that is easy to read, without anchors or aliases and with multi-line strings as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True for every object, so that an object that occurs twice is written twice instead of as an alias."""
        return True


_ManifestDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
