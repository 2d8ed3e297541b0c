"""The Job or MPIJob of each step, filled from a pipeline: how many pods, what they run, what they ask for, where they run.

The kustomizations below `k8s/` hold the shape of every object; what a pipeline decides is set here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodPlacement
from gaudi_bert.runners.kubernetes.kustomize import Manifest
from gaudi_bert.runners.launch import EFA_SSH_PORT, ROOT_SSH_PORT, SSH_KEY, USER_SSH_PORT, training_command
from gaudi_bert.runners.requirements import (
    CREDENTIALS,
    evaluation_resources,
    image_reference,
    pod_resources,
    quantity_value,
    training_resources,
)
from gaudi_bert.runners.stage_table import STEPS

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def fill_step(settings: PipelineSettings, step: str, item: Manifest) -> None:
    """Fill the Job or MPIJob of `step`."""
    stage = STEPS[step]
    does_the_work = step == stage.name
    if settings.kubernetes.queue:
        # Not on the pods: each would be queued by itself. And not suspended here: without a queue nobody would resume it.
        item["metadata"]["labels"][QUEUE_LABEL] = settings.kubernetes.queue
    if item["kind"] == "Job":
        item["spec"]["ttlSecondsAfterFinished"] = settings.kubernetes.keep_seconds
    if does_the_work and stage.shared:
        _share_out(item, settings.resources.data_workers)
    if does_the_work and stage.parallel:
        # As many as a pod's memory is meant for, however many cores the node has.
        _set_option(next(pod_specs(item))["containers"][0], "--workers", str(settings.resources.data_processes))
    if item["kind"] == "MPIJob":
        _fill_mpijob(settings, item)
    elif stage.distributed:
        _fill_training_job(settings, item)
    else:
        container = next(pod_specs(item))["containers"][0]
        resources = settings.resources
        container["resources"] = evaluation_resources(resources) if stage.trains else pod_resources(resources.data)
    for spec in pod_specs(item):
        _fill_pod(settings, spec)
    _place(settings, step, item)
    port = {"train": settings.training.metrics_port, "finetune": settings.finetune.metrics_port}.get(step)
    if port is not None:
        # Rank 0 is on the only worker, or on the first one, which has no template of its own.
        *_, worker = pod_templates(item)
        _announce_metrics(port, worker)
    _use_store(settings, item)


def training_placement(settings: PipelineSettings) -> PodPlacement:
    """Where training pods may run; `kubernetes.node_selector` is for those that train alone."""
    placement = settings.kubernetes.training_pods
    selector = {**settings.kubernetes.node_selector, **placement.node_selector}
    return placement.model_copy(update={"node_selector": selector})


def _place(settings: PipelineSettings, step: str, item: Manifest) -> None:
    kubernetes, (first, *workers) = settings.kubernetes, pod_templates(item)
    if not STEPS[step].trains:
        _place_pod(kubernetes.data_pods, first)
        return
    placement = training_placement(settings) if STEPS[step].distributed else kubernetes.training_pods
    _place_pod(placement, first, chooses_node=not workers)
    for template in workers:
        _place_pod(placement, template)


def _share_out(item: Manifest, pods: int) -> None:
    """Let `pods` pods do an indexed step, each its part, and with retries for each where the Job counts them together."""
    spec = item["spec"]
    if "backoffLimit" in spec:
        spec["backoffLimit"] = spec["backoffLimit"] // spec["completions"] * pods
    spec["completions"] = spec["parallelism"] = pods
    _set_option(next(pod_specs(item))["containers"][0], "--shard", f"$(JOB_COMPLETION_INDEX)/{pods}")


def _stage_command(command: Sequence[str]) -> list[str]:
    """What a training process runs: the command from `gaudi-bert` on."""
    return list(command[list(command).index("gaudi-bert") :])


def _fill_training_job(settings: PipelineSettings, item: Manifest) -> None:
    # A Job is one worker with all of its cards, whatever the pipeline's MPIJob has.
    resources = settings.resources.model_copy(update={"workers": 1})
    kubernetes = settings.kubernetes.model_copy(update={"efa": 0})
    settings = settings.model_copy(update={"resources": resources, "kubernetes": kubernetes})
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
    root_port = EFA_SSH_PORT if settings.kubernetes.efa else ROOT_SSH_PORT
    container["command"] = training_command(
        settings,
        _stage_command(container["command"]),
        over_ssh=True,
        variables=(
            *(variable["name"] for variable in container.get("env", ())),
            *(CREDENTIALS if settings.kubernetes.store else ()),
        ),
        ssh_port=root_port if resources.cards else USER_SSH_PORT,
        ssh_key=None if resources.cards else SSH_KEY,
    )
    worker["containers"][0]["resources"] = training_resources(settings)
    if needs_user_name(settings):
        for spec_of_role in (launcher, worker):
            name = {"name": "pipeline", "mountPath": "/etc/passwd", "subPath": USER_NAME_FILE, "readOnly": True}
            spec_of_role["containers"][0]["volumeMounts"].append(name)
    _set_shared_memory(settings, worker)


def _set_environment(settings: PipelineSettings, container: Manifest) -> None:
    given = settings.resources.environment
    variables = [variable for variable in container.get("env", ()) if variable["name"] not in given]
    variables += [{"name": name, "value": value} for name, value in given.items()]
    if variables:
        container["env"] = variables


def _set_shared_memory(settings: PipelineSettings, spec: Manifest) -> None:
    for volume in spec["volumes"]:
        if volume["name"] == "shared-memory":
            volume["emptyDir"]["sizeLimit"] = settings.resources.shared_memory


# --- what all pods take from a pipeline

DATA_FOLDER = "/data"
# Beside the pipeline in its ConfigMap, mounted as /etc/passwd.
USER_NAME_FILE = "passwd"
_IMAGE_USER = 1000
_SCRATCH = "scratch"


def pod_templates(item: Manifest) -> Iterator[Manifest]:
    """The pod templates of a Job or of an MPIJob (launcher, then workers)."""
    if item["kind"] == "MPIJob":
        for replica in ("Launcher", "Worker"):
            yield item["spec"]["mpiReplicaSpecs"][replica]["template"]
    else:
        yield item["spec"]["template"]


def pod_specs(item: Manifest) -> Iterator[Manifest]:
    """The pod specs of a Job or of an MPIJob (launcher, then workers)."""
    for template in pod_templates(item):
        yield template["spec"]


def work_claim_name(settings: PipelineSettings) -> str:
    """The claim of the volume that holds the work folder: the one that the pipeline names, or its own."""
    return settings.kubernetes.work_claim or f"{settings.name}-work"


def needs_user_name(settings: PipelineSettings) -> bool:
    """Whether pods run ssh as a user whom the image has no name for; neither ssh nor sshd works for one."""
    return settings.trains_as_mpijob and not settings.resources.cards and settings.kubernetes.user != _IMAGE_USER


def user_name_file(settings: PipelineSettings) -> str:
    """An /etc/passwd with the one user of the pods."""
    user = settings.kubernetes.user
    return f"gaudi-bert:x:{user}:{user}::/tmp:/bin/sh\n"


def _set_option(container: Manifest, option: str, value: str) -> None:
    command = container["command"]
    command[command.index(option) + 1] = value


def _fill_pod(settings: PipelineSettings, spec: Manifest) -> None:
    """What all pods take from the pipeline: account, volumes, images, how long to wait."""
    kubernetes, images = settings.kubernetes, settings.images
    spec["serviceAccountName"] = f"{settings.name}-{spec['serviceAccountName']}"
    if spec["securityContext"].get("runAsNonRoot"):
        spec["securityContext"] |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), kubernetes.user)
    if images.pull_secret:
        spec["imagePullSecrets"] = [{"name": images.pull_secret}]
    _fill_volumes(settings, spec)
    names = {"gaudi-bert-data": images.data, "gaudi-bert-train": images.train}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container["image"] = image_reference(images, names[container["image"]])
        container["imagePullPolicy"] = images.pull_policy
        if kubernetes.data_claim and "volumeMounts" in container:
            container["volumeMounts"].append({"name": "data", "mountPath": DATA_FOLDER, "readOnly": True})
        if container["name"] == "wait":
            _set_option(container, "--timeout", str(kubernetes.wait_seconds))


def _fill_volumes(settings: PipelineSettings, spec: Manifest) -> None:
    for volume in spec["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = f"{settings.name}-pipeline"
        if "persistentVolumeClaim" in volume:
            volume["persistentVolumeClaim"]["claimName"] = work_claim_name(settings)
        if volume["name"] == _SCRATCH:
            volume["emptyDir"]["sizeLimit"] = settings.kubernetes.scratch
            for container in spec["containers"]:
                container["resources"]["requests"]["ephemeral-storage"] = settings.kubernetes.scratch
    if settings.kubernetes.data_claim:
        claim = {"claimName": settings.kubernetes.data_claim, "readOnly": True}
        spec["volumes"].append({"name": "data", "persistentVolumeClaim": claim})


def _place_pod(placement: PodPlacement, template: Manifest, *, chooses_node: bool = True) -> None:
    """Say where a pod may run and how it is marked; `chooses_node` is False for one that only starts others."""
    spec, metadata = template["spec"], template["metadata"]
    values: dict[str, Any] = {
        "tolerations": [toleration.as_manifest() for toleration in placement.tolerations],
        "priorityClassName": placement.priority_class,
    }
    if chooses_node:
        values |= {
            "nodeSelector": dict(placement.node_selector),
            "affinity": dict(placement.affinity),
            "runtimeClassName": placement.runtime_class,
        }
    spec |= {key: value for key, value in values.items() if value}
    # The labels by which pods are found stay ours.
    metadata["labels"] = {**placement.labels, **metadata["labels"]}
    if placement.annotations:
        metadata["annotations"] = {**metadata.get("annotations", {}), **placement.annotations}


def _announce_metrics(port: int, template: Manifest) -> None:
    """Say where a pod serves its figures: by a named port, and by the annotations that Prometheus' usual set-up reads."""
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}
    metadata = template["metadata"]
    metadata["annotations"] = {**annotations, **metadata.get("annotations", {})}
    template["spec"]["containers"][0]["ports"] = [{"name": "metrics", "containerPort": port}]


# --- the work folder in an object store: no volume, but scratch on the node (/tmp), and credentials from a Secret
#
# The component `k8s/components/object-store` does the same for kubectl.


def _use_store(settings: PipelineSettings, item: Manifest) -> None:
    """Let the pods of a Job or MPIJob work in `kubernetes.store`, if the pipeline names one."""
    store, secret = settings.kubernetes.store, settings.kubernetes.store_secret
    if store is None:
        return
    for spec in pod_specs(item):
        spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "work"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            if "volumeMounts" in container:
                container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "work"]
            command = container["command"]
            if "--work" in command:
                command[command.index("--work") + 1] = store
                if secret:
                    container["envFrom"] = [{"secretRef": {"name": secret}}]


def cache_bytes(settings: PipelineSettings) -> int:
    """How much of a training pod's scratch packed shards may take: no more than half."""
    return min(settings.store.cache_bytes, int(quantity_value(settings.kubernetes.scratch)) // 2)
