"""The manifests of `k8s/`, filled from a pipeline file: what `--on kubernetes` submits and `--render` writes.

The kustomizations hold the shape of every object; this module sets what a pipeline decides: names, namespace, images, how
many pods share a stage, resources, the training command, volumes. `k8s/overlays/` are the same manifests filled by kustomize
for the demo; the tests hold both to the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.images import image_reference
from gaudi_bert.runners.kubernetes.kustomize import Manifest, build
from gaudi_bert.runners.mpirun import EFA_SSH_PORT, SSH_PORT, training_command
from gaudi_bert.runners.named_paths import named_paths
from gaudi_bert.runners.pod_resources import evaluation_resources, pod_resources, training_resources
from gaudi_bert.runners.stage_table import STEPS

__all__ = ["FAILURE_POLICY_SINCE", "PIPELINE_LABEL", "Manifests", "pod_specs", "render", "work_claim_name"]

PIPELINE_LABEL = "app.kubernetes.io/instance"
# The first version of Kubernetes that knows podFailurePolicy and backoffLimitPerIndex without being told to.
FAILURE_POLICY_SINCE = (1, 29)
_DATA_FOLDER = "/data"
# Paths that mean the same inside every container.
_MOUNTED = (_DATA_FOLDER, "/work")


@dataclass(frozen=True)
class Manifests:
    """All objects of a pipeline.

    Attributes:
        namespace: the Namespace; it is the cluster's, not the pipeline's.
        shared: what all stages use: ServiceAccount, PersistentVolumeClaim, ConfigMap.
        steps: the Job or MPIJob of each step, in the pipeline's order.
    """

    namespace: Manifest
    shared: tuple[Manifest, ...]
    steps: dict[str, Manifest]


def render(settings: PipelineSettings, server_version: tuple[int, int] | None = None) -> Manifests:
    """Fill the manifests from `settings`.

    Args:
        settings: the pipeline.
        server_version: of the cluster, for what is decided by it; None for a cluster of today.

    Raises:
        InputError: a path of the pipeline file means nothing inside a container.
    """
    _check_paths(settings)
    training = "training-mpijob" if settings.trains_as_mpijob else "training"
    objects = build(("base", "data", training, "results"), _components(settings, server_version))
    steps = {item["metadata"]["name"]: item for item in objects if item["kind"] in ("Job", "MPIJob")}
    others = {item["kind"]: item for item in objects if item["kind"] not in ("Job", "MPIJob")}
    others["ConfigMap"] = _configuration(settings)
    for step, item in steps.items():
        _fill_step(settings, step, item)
    _fill_claim(settings, others["PersistentVolumeClaim"])
    for item in (*others.values(), *steps.values()):
        _set_names(settings, item)
    namespace = others.pop("Namespace")
    if settings.kubernetes.work_claim:
        del others["PersistentVolumeClaim"]
    return Manifests(namespace, tuple(others.values()), steps)


def work_claim_name(settings: PipelineSettings) -> str:
    """The claim of the volume that holds the work folder: the one that the pipeline names, or its own."""
    return settings.kubernetes.work_claim or f"{settings.name}-work"


def pod_specs(item: Manifest) -> Iterator[dict[str, Any]]:
    """The pod specs of a Job or of an MPIJob (launcher, then workers)."""
    if item["kind"] == "MPIJob":
        for replica in ("Launcher", "Worker"):
            yield item["spec"]["mpiReplicaSpecs"][replica]["template"]["spec"]
    else:
        yield item["spec"]["template"]["spec"]


def _components(settings: PipelineSettings, server_version: tuple[int, int] | None) -> list[str]:
    policy = settings.kubernetes.failure_policy
    if policy == "auto":
        policy = server_version is None or server_version >= FAILURE_POLICY_SINCE
    as_root = settings.resources.cards or settings.trains_as_mpijob
    wanted = {
        "components/evaluate-as-root": as_root,
        "components/gaudi": settings.resources.cards,
        "components/efa": settings.kubernetes.efa,
        "components/failure-policy": policy,
    }
    return [component for component, needed in wanted.items() if needed]


def _check_paths(settings: PipelineSettings) -> None:
    for key, path in named_paths(settings):
        if not any(PurePosixPath(path).is_relative_to(folder) for folder in _MOUNTED):
            raise InputError(
                f"{key} = {path}: no such place in a container; put it on a volume, name that volume's claim in "
                f"kubernetes.data_claim, and write the path as {_DATA_FOLDER}/..."
            )
        if PurePosixPath(path).is_relative_to(_DATA_FOLDER) and not settings.kubernetes.data_claim:
            raise InputError(f"{key} = {path}: needs a volume at {_DATA_FOLDER}; name its claim in kubernetes.data_claim")


def _configuration(settings: PipelineSettings) -> Manifest:
    """The ConfigMap with the pipeline file; only what was set is written, so that it reads like the file."""
    text = yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True), sort_keys=False, default_flow_style=None)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "pipeline", "labels": {"app.kubernetes.io/name": "gaudi-bert"}},
        "data": {"pipeline.yaml": text},
    }


def _set_names(settings: PipelineSettings, item: Manifest) -> None:
    """Set namespace, prefix and the pipeline's label."""
    metadata = item["metadata"]
    metadata["labels"][PIPELINE_LABEL] = settings.name
    if item["kind"] == "Namespace":
        metadata["name"] = settings.kubernetes.namespace
        return
    metadata["name"] = f"{settings.name}-{metadata['name']}"
    metadata["namespace"] = settings.kubernetes.namespace


def _fill_claim(settings: PipelineSettings, item: Manifest) -> None:
    spec = item["spec"]
    spec["accessModes"] = [settings.kubernetes.access_mode]
    spec["resources"]["requests"]["storage"] = settings.kubernetes.storage
    if settings.kubernetes.storage_class:
        spec["storageClassName"] = settings.kubernetes.storage_class


def _fill_step(settings: PipelineSettings, step: str, item: Manifest) -> None:
    stage = STEPS[step]
    does_the_work = step == stage.name
    for spec in pod_specs(item):
        _fill_pod(settings, spec)
    if item["kind"] == "Job":
        item["spec"]["ttlSecondsAfterFinished"] = settings.kubernetes.keep_seconds
    if does_the_work and stage.shared:
        _share_out(item, settings.resources.data_workers)
    if does_the_work and stage.parallel:
        # As many as a pod's memory is meant for, however many cores the node has.
        _set_option(next(pod_specs(item))["containers"][0], "--workers", str(settings.resources.data_processes))
    if item["kind"] == "MPIJob":
        _fill_mpijob(settings, item)
    elif step == "train":
        _fill_training_job(settings, item)
    else:
        container = next(pod_specs(item))["containers"][0]
        evaluates = step == "evaluate"
        container["resources"] = (
            evaluation_resources(settings.resources) if evaluates else pod_resources(settings.resources.data)
        )
    if step == "train" and settings.kubernetes.node_selector:
        *_, workers = pod_specs(item)
        workers["nodeSelector"] = dict(settings.kubernetes.node_selector)


def _fill_pod(settings: PipelineSettings, spec: dict[str, Any]) -> None:
    """What all pods take from the pipeline: account, volumes, images, how long to wait."""
    kubernetes, images = settings.kubernetes, settings.images
    spec["serviceAccountName"] = f"{settings.name}-{spec['serviceAccountName']}"
    if spec["securityContext"].get("runAsNonRoot"):
        spec["securityContext"] |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), kubernetes.user)
    if images.pull_secret:
        spec["imagePullSecrets"] = [{"name": images.pull_secret}]
    for volume in spec["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = f"{settings.name}-pipeline"
        if "persistentVolumeClaim" in volume:
            volume["persistentVolumeClaim"]["claimName"] = work_claim_name(settings)
    if kubernetes.data_claim:
        spec["volumes"].append(
            {"name": "data", "persistentVolumeClaim": {"claimName": kubernetes.data_claim, "readOnly": True}}
        )
    names = {"gaudi-bert-data": images.data, "gaudi-bert-train": images.train}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container["image"] = image_reference(images, names[container["image"]])
        container["imagePullPolicy"] = images.pull_policy
        if kubernetes.data_claim and "volumeMounts" in container:
            container["volumeMounts"].append({"name": "data", "mountPath": _DATA_FOLDER, "readOnly": True})
        if container["name"] == "wait":
            _set_option(container, "--timeout", str(kubernetes.wait_seconds))


def _share_out(item: Manifest, pods: int) -> None:
    """Let `pods` pods do an indexed step, each its part, and with retries for each where the Job counts them together."""
    spec = item["spec"]
    if "backoffLimit" in spec:
        spec["backoffLimit"] = spec["backoffLimit"] // spec["completions"] * pods
    spec["completions"] = spec["parallelism"] = pods
    _set_option(next(pod_specs(item))["containers"][0], "--shard", f"$(JOB_COMPLETION_INDEX)/{pods}")


def _set_option(container: dict[str, Any], option: str, value: str) -> None:
    command = container["command"]
    command[command.index(option) + 1] = value


def _stage_command(command: Sequence[str]) -> list[str]:
    """What a training process runs: the command from `gaudi-bert` on."""
    return list(command[list(command).index("gaudi-bert") :])


def _fill_training_job(settings: PipelineSettings, item: Manifest) -> None:
    spec = next(pod_specs(item))
    container = spec["containers"][0]
    container["command"] = training_command(settings, _stage_command(container["command"]), over_ssh=False)
    container["resources"] = training_resources(settings)
    _set_environment(settings, container)
    _set_shared_memory(settings, spec)


def _fill_mpijob(settings: PipelineSettings, item: Manifest) -> None:
    resources = settings.resources
    spec = item["spec"]
    spec["slotsPerWorker"] = resources.processes_per_worker
    spec["runPolicy"]["ttlSecondsAfterFinished"] = settings.kubernetes.keep_seconds
    spec["runPolicy"]["schedulingPolicy"]["minAvailable"] = resources.workers
    spec["mpiReplicaSpecs"]["Worker"]["replicas"] = resources.workers
    launcher, worker = pod_specs(item)
    container = launcher["containers"][0]
    _set_environment(settings, container)
    container["command"] = training_command(
        settings,
        _stage_command(container["command"]),
        over_ssh=True,
        variables=tuple(variable["name"] for variable in container.get("env", ())),
        ssh_port=EFA_SSH_PORT if settings.kubernetes.efa else SSH_PORT,
    )
    worker["containers"][0]["resources"] = training_resources(settings)
    _set_shared_memory(settings, worker)


def _set_environment(settings: PipelineSettings, container: dict[str, Any]) -> None:
    given = settings.resources.environment
    variables = [variable for variable in container.get("env", ()) if variable["name"] not in given]
    variables += [{"name": name, "value": value} for name, value in given.items()]
    if variables:
        container["env"] = variables


def _set_shared_memory(settings: PipelineSettings, spec: dict[str, Any]) -> None:
    for volume in spec["volumes"]:
        if volume["name"] == "shared-memory":
            volume["emptyDir"]["sizeLimit"] = settings.resources.shared_memory
