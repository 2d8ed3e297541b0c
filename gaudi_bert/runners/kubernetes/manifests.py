"""The manifests of `k8s/`, filled from a pipeline file: what `--on kubernetes` submits and `--render` writes.

`render` reads the kustomizations, then fills what the steps share, the Job of each step and its pods, in the order of this
file. `k8s/overlays/` are the same manifests filled by kustomize for the demo; the tests hold both to the same result.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import in_store
from gaudi_bert.common.launch import NODE_ADDRESS, NODE_VARIABLES
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.kubernetes.pods import DATA_FOLDER, Manifest, fill_pods, pod_specs, set_option
from gaudi_bert.runners.launch import EFA_SSH_PORT, ROOT_SSH_PORT, SSH_KEY, USER_SSH_PORT, training_command
from gaudi_bert.runners.stage_table import (
    STEPS,
    Stage,
    evaluation_resources,
    named_paths,
    pod_resources,
    quantity_value,
    stage_engine,
    stages_of,
    steps_of,
    training_resources,
)

PIPELINE_LABEL = "app.kubernetes.io/instance"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
# The first version of Kubernetes in which podFailurePolicy and backoffLimitPerIndex are on by default.
FAILURE_POLICY_SINCE = (1, 29)
# What a step may be, and the label by which the pods of each are selected.
POD_LABELS = {
    "Job": "job-name",
    "MPIJob": "training.kubeflow.org/job-name",
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
}
# Paths that mean the same inside every container.
_MOUNTED = (DATA_FOLDER, "/work")
# Next to the pipeline in its ConfigMap, mounted as /etc/passwd.
_USER_NAME_FILE = "passwd"
_IMAGE_USER = 1000
# What ranks on other pods get of the launcher's environment; `stop_ranks` writes out the names that exist.
_CREDENTIALS = ("AWS_*", "AZURE_*", "GOOGLE_*")


@dataclass(frozen=True)
class Manifests:
    """All objects of a pipeline.

    The Namespace is the cluster's, not the pipeline's; `shared` is what is there in addition to the steps, by its kind:
    ServiceAccount, PersistentVolumeClaim, ConfigMap, and the Service, NetworkPolicy and TrainingRuntime of pods that train
    together; `steps` are Jobs, MPIJobs and TrainJobs in the pipeline's order.
    """

    namespace: Manifest
    shared: dict[str, Manifest]
    steps: dict[str, Manifest]

    def pod_specs(self, step: str) -> list[Manifest]:
        """The pod specs of a step; those of a TrainJob are in its runtime."""
        item = self.steps[step]
        return list(pod_specs(self.shared["TrainingRuntime"] if item["kind"] == "TrainJob" else item))


def render(settings: PipelineSettings, server_version: tuple[int, int] | None = None) -> Manifests:
    """Fill the manifests from `settings`, for a cluster of `server_version`; None for `kubernetes.version`."""
    _check_paths(settings)
    training = "training-mpijob" if settings.trains_as_mpijob else "training"
    training = "training-nodes" if settings.trains_on_nodes else training
    network = ("training-network",) if settings.has_network_policy and settings.trains_as_mpijob else ()
    tasks = ("finetuning",) if settings.finetunes else ()
    objects = _build(("base", "data", training, *network, *tasks, "results"), _components(settings, server_version))
    jobs = {item["metadata"]["name"]: item for item in objects if item["kind"] in ("Job", "MPIJob")}
    steps = {step: jobs[step] for step in steps_of(stages_of(settings))}
    shared = {item["kind"]: item for item in objects if item["kind"] not in ("Job", "MPIJob")}
    shared["ConfigMap"] = _configuration(settings)
    claim = shared["PersistentVolumeClaim"]["spec"]
    claim["accessModes"] = [settings.kubernetes.access_mode]
    claim["resources"]["requests"]["storage"] = settings.kubernetes.storage
    if settings.kubernetes.storage_class:
        claim["storageClassName"] = settings.kubernetes.storage_class
    if not settings.needs_service:
        shared.pop("Service", None)
    if not settings.has_network_policy:
        shared.pop("NetworkPolicy", None)
    for kind in ("NetworkPolicy", "Service"):
        if kind in shared:
            _fill_selectors(settings, shared[kind])
    for step, item in steps.items():
        _fill_step(settings, step, item)
    namespace = shared.pop("Namespace")
    namespace["metadata"]["labels"][PIPELINE_LABEL] = settings.name
    namespace["metadata"]["name"] = settings.kubernetes.namespace
    for item in (*shared.values(), *steps.values()):
        metadata = item["metadata"]
        metadata["labels"][PIPELINE_LABEL] = settings.name
        metadata["name"] = f"{settings.name}-{metadata['name']}"
        metadata["namespace"] = settings.kubernetes.namespace
    if settings.kubernetes.work_claim or settings.kubernetes.store:
        del shared["PersistentVolumeClaim"]
    if "train" in steps and settings.training_kind == "trainjob":
        steps["train"], shared["TrainingRuntime"] = _as_trainjob(settings, steps["train"])
    return Manifests(namespace, shared, steps)


def _check_paths(settings: PipelineSettings) -> None:
    if settings.finetunes and settings.kubernetes.store:
        raise InputError(
            f"kubernetes.store = {settings.kubernetes.store}: the stages finetune and predict have their work folder on "
            "a volume; leave it out (rows and weights may be URLs)"
        )
    for key, path in named_paths(settings):
        if in_store(path):
            continue
        if not any(PurePosixPath(path).is_relative_to(folder) for folder in _MOUNTED):
            raise InputError(
                f"{key} = {path}: no such path in a container; put it on a volume, name that volume's claim in "
                f"kubernetes.data_claim, and write the path as {DATA_FOLDER}/..."
            )
        if PurePosixPath(path).is_relative_to(DATA_FOLDER) and not settings.kubernetes.data_claim:
            raise InputError(f"{key} = {path}: needs a volume at {DATA_FOLDER}; name its claim in kubernetes.data_claim")


def _components(settings: PipelineSettings, server_version: tuple[int, int] | None) -> list[str]:
    policy = settings.kubernetes.failure_policy
    if policy == "auto":
        policy = (server_version or settings.kubernetes.version_numbers) >= FAILURE_POLICY_SINCE
    components = {
        "components/evaluate-as-root": settings.resources.cards,
        "components/gaudi": settings.resources.cards,
        "components/efa": settings.kubernetes.efa,
        "components/failure-policy": policy,
        "components/scratch": True,
    }
    return [component for component, needed in components.items() if needed]


# --- what the steps share


def _configuration(settings: PipelineSettings) -> Manifest:
    """The ConfigMap with the pipeline file; only what was set is written, so that it reads like the file."""
    values = settings.model_dump(mode="json", exclude_unset=True)
    # Packed shards may take at most half of a training pod's scratch.
    half_scratch = int(quantity_value(settings.kubernetes.scratch)) // 2
    if settings.kubernetes.store and half_scratch < settings.store.cache_bytes:
        values["store"] = {**values.get("store", {}), "cache_bytes": half_scratch}
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
    user = settings.kubernetes.user
    names = {_USER_NAME_FILE: f"gaudi-bert:x:{user}:{user}::/tmp:/bin/sh\n"} if _needs_user_name(settings) else {}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "pipeline", "labels": {"app.kubernetes.io/name": "gaudi-bert"}},
        "data": {"pipeline.yaml": text} | names,
    }


def _needs_user_name(settings: PipelineSettings) -> bool:
    """Whether pods run ssh as a user without a name in the image, for whom neither ssh nor sshd works."""
    return settings.trains_as_mpijob and not settings.resources.cards and settings.kubernetes.user != _IMAGE_USER


def _fill_selectors(settings: PipelineSettings, item: Manifest) -> None:
    """Say which pods a Service names, or a NetworkPolicy lets reach one another."""
    spec = item["spec"]
    kind = {"job": "Job", "mpijob": "MPIJob", "trainjob": "TrainJob"}[settings.training_kind]
    pods = {POD_LABELS[kind]: f"{settings.name}-train"}
    if item["kind"] == "Service":
        spec["selector"] = pods
        return
    spec["podSelector"] = {"matchLabels": pods}
    spec["ingress"] = [{"from": [{"podSelector": {"matchLabels": pods}}]}]


# --- the Job or MPIJob of a step: how many pods, what they run, what they request, where they run


def _fill_step(settings: PipelineSettings, step: str, item: Manifest) -> None:
    stage = STEPS[step]
    is_main_step = step == stage.name
    if settings.kubernetes.queue:
        # Not on the pods: each would be queued by itself. And not suspended here: without a queue nobody would resume it.
        item["metadata"]["labels"][QUEUE_LABEL] = settings.kubernetes.queue
    if item["kind"] == "Job":
        item["spec"]["ttlSecondsAfterFinished"] = settings.kubernetes.keep_seconds
    if is_main_step and stage.shared:
        _share_out(item, settings.resources.data_workers)
    if is_main_step and stage.parallel:
        # As many as a pod's memory is meant for, however many cores the node has.
        set_option(next(pod_specs(item))["containers"][0], "--workers", str(settings.resources.data_processes))
    if item["kind"] == "MPIJob":
        _fill_mpijob(settings, item)
    elif is_main_step and step == "train" and settings.trains_on_nodes:
        _fill_nodes(settings, item)
    elif stage.distributed:
        _fill_training_job(settings, stage, item)
    else:
        container = next(pod_specs(item))["containers"][0]
        resources = settings.resources
        container["resources"] = evaluation_resources(resources) if stage.trains else pod_resources(resources.data)
    fill_pods(settings, step, item)


def _share_out(item: Manifest, pods: int) -> None:
    """Let `pods` pods do an indexed step, each its part, and with retries for each where the Job counts them together."""
    _set_pods(item, pods)
    set_option(next(pod_specs(item))["containers"][0], "--shard", f"$(JOB_COMPLETION_INDEX)/{pods}")


def _set_pods(item: Manifest, pods: int) -> None:
    spec = item["spec"]
    if "backoffLimit" in spec:
        spec["backoffLimit"] = spec["backoffLimit"] // spec["completions"] * pods
    spec["completions"] = spec["parallelism"] = pods


def _fill_nodes(settings: PipelineSettings, item: Manifest) -> None:
    """The pods of an Indexed Job that train together, each with its own processes."""
    _set_pods(item, settings.resources.workers)
    spec = next(pod_specs(item))
    spec["subdomain"] = f"{settings.name}-{spec['subdomain']}"
    container = spec["containers"][0]
    container["resources"] = training_resources(settings)
    counts = {"PET_NNODES": settings.resources.workers, "PET_NPROC_PER_NODE": settings.resources.processes_per_worker}
    for variable in container["env"]:
        if variable["name"] in counts:
            variable["value"] = str(counts[variable["name"]])
    _set_environment(settings, container)


def _fill_training_job(settings: PipelineSettings, stage: Stage, item: Manifest) -> None:
    # A Job is one worker with all of its cards, whatever the pipeline's MPIJob has.
    resources = settings.resources.model_copy(update={"workers": 1})
    kubernetes = settings.kubernetes.model_copy(update={"efa": 0})
    settings = settings.model_copy(update={"resources": resources, "kubernetes": kubernetes})
    spec = next(pod_specs(item))
    container = spec["containers"][0]
    command = _of_one_process(container["command"])
    if stage_engine(settings, stage) == "tensorflow":
        command = training_command(settings, command, over_ssh=False)
    container["command"] = command
    container["resources"] = training_resources(settings)
    _set_environment(settings, container)


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
    root_port = EFA_SSH_PORT if settings.kubernetes.efa else ROOT_SSH_PORT
    container["command"] = training_command(
        settings,
        _of_one_process(container["command"]),
        over_ssh=True,
        variables=(
            *(variable["name"] for variable in container.get("env", ())),
            *(_CREDENTIALS if settings.kubernetes.store else ()),
        ),
        ssh_port=root_port if resources.cards else USER_SSH_PORT,
        ssh_key=None if resources.cards else SSH_KEY,
    )
    worker["containers"][0]["resources"] = training_resources(settings)
    if _needs_user_name(settings):
        for spec_of_role in (launcher, worker):
            name = {"name": "pipeline", "mountPath": "/etc/passwd", "subPath": _USER_NAME_FILE, "readOnly": True}
            spec_of_role["containers"][0]["volumeMounts"].append(name)


def _of_one_process(command: list[str]) -> list[str]:
    return command[command.index("gaudi-bert") :]


def _set_environment(settings: PipelineSettings, container: Manifest) -> None:
    given = settings.resources.environment
    variables = [variable for variable in container.get("env", ()) if variable["name"] not in given]
    variables += [{"name": name, "value": value} for name, value in given.items()]
    if variables:
        container["env"] = variables


# --- the pods of an Indexed Job for Kubeflow Trainer: a TrainJob has their number, a TrainingRuntime their template
#
# Trainer makes a JobSet of them, and sets the variables by which they meet in the container `node`.

_TRAINER = "trainer.kubeflow.org"


def _as_trainjob(settings: PipelineSettings, job: Manifest) -> tuple[Manifest, Manifest]:
    """The TrainJob and its TrainingRuntime that run the pods of `job`."""
    metadata, spec = job["metadata"], copy.deepcopy(job["spec"])
    for key in ("completions", "parallelism", "completionMode", "ttlSecondsAfterFinished"):
        del spec[key]
    pod = spec["template"]["spec"]
    del pod["subdomain"]
    container = pod["containers"][0]
    container["name"] = "node"
    theirs = ("JOB_NAME", NODE_ADDRESS, *NODE_VARIABLES)
    container["env"] = [variable for variable in container["env"] if variable["name"] not in theirs]
    node = {"metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}, "spec": spec}
    workers, processes = settings.resources.workers, settings.resources.processes_per_worker
    runtime = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": {**metadata["labels"], f"{_TRAINER}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": workers, "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": node}]}},
        },
    }
    train_job = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": metadata["name"]},
            "trainer": {"numNodes": workers, "numProcPerNode": processes},
        },
    }
    return train_job, runtime


# --- our own kustomizations, built without kustomize: resources, components and JSON patches (RFC 6902), and nothing else
#
# So the very manifests that `kubectl apply -k` takes are filled, on machines without kubectl too. What only overlays use
# (name prefixes, image tags, generators) comes from the pipeline file instead.

_MANIFESTS = Path(__file__).parent / "manifests"
# Where PyYAML has libyaml, a hundred files are read in a tenth of a second.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _build(resources: Sequence[str], components: Sequence[str] = ()) -> list[Manifest]:
    """The objects of the kustomizations `resources`, patched by `components`; all are folders below `k8s/`."""
    objects = [item for folder in resources for item in _build_folder(_MANIFESTS / folder)]
    for component in components:
        _apply_patches(_MANIFESTS / component, objects)
    return objects


def _build_folder(folder: Path) -> list[Manifest]:
    kustomization = _read(folder / "kustomization.yaml")
    objects: list[Manifest] = []
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        objects += _build_folder(path) if path.is_dir() else [_read(path)]
    for name in kustomization.get("components", ()):
        _apply_patches((folder / name).resolve(), objects)
    _apply_patches(folder, objects)
    return objects


def _apply_patches(folder: Path, objects: Sequence[Manifest]) -> None:
    """Apply the patches that `folder`'s kustomization lists to those of `objects` that they are meant for."""
    for patch in _read(folder / "kustomization.yaml").get("patches", ()):
        operations, target = _read(folder / patch["path"]), patch["target"]
        for item in objects:
            if item["kind"] == target["kind"] and re.fullmatch(target.get("name", ".*"), item["metadata"]["name"]):
                for operation in operations:
                    _apply_operation(item, operation)


def _apply_operation(item: Any, operation: Mapping[str, Any]) -> None:
    """One `add`, `replace` or `remove` of a key; of a list, an item is replaced by its index; `-` adds one at the end."""
    *parents, last = operation["path"].lstrip("/").split("/")
    for part in parents:
        item = item[int(part)] if isinstance(item, list) else item[part]
    if operation["op"] == "remove":
        del item[last]
    elif last == "-":
        item.append(copy.deepcopy(operation["value"]))
    else:
        replaced = isinstance(item, list) and operation["op"] == "replace"
        item[int(last) if replaced else last] = copy.deepcopy(operation["value"])


def _read(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)
