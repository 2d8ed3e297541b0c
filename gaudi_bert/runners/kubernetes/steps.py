"""The Job or MPIJob of each step, filled from a pipeline: how many pods, what they run, what they ask for."""

from __future__ import annotations

from collections.abc import Sequence

from gaudi_bert.config import PipelineSettings, PodPlacement
from gaudi_bert.runners.kubernetes.kustomize import Manifest
from gaudi_bert.runners.kubernetes.pods import (
    USER_NAME_FILE,
    announce_metrics,
    fill_pod,
    needs_user_name,
    place_pod,
    pod_specs,
    pod_templates,
    set_option,
)
from gaudi_bert.runners.kubernetes.suspension import QUEUE_LABEL
from gaudi_bert.runners.mpirun import EFA_SSH_PORT, ROOT_SSH_PORT, SSH_KEY, USER_SSH_PORT, training_command
from gaudi_bert.runners.pod_resources import evaluation_resources, pod_resources, training_resources
from gaudi_bert.runners.stage_table import STEPS
from gaudi_bert.runners.store_environment import CREDENTIALS

__all__ = ["fill_step", "training_placement"]


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
        set_option(next(pod_specs(item))["containers"][0], "--workers", str(settings.resources.data_processes))
    if item["kind"] == "MPIJob":
        _fill_mpijob(settings, item)
    elif stage.distributed:
        _fill_training_job(_alone(settings), item)
    else:
        container = next(pod_specs(item))["containers"][0]
        resources = settings.resources
        container["resources"] = evaluation_resources(resources) if stage.trains else pod_resources(resources.data)
    for spec in pod_specs(item):
        fill_pod(settings, spec)
    _place(settings, step, item)
    port = _metrics_port(settings, step)
    if port is not None:
        # Rank 0 is on the only worker, or on the first one, which has no template of its own.
        *_, worker = pod_templates(item)
        announce_metrics(port, worker)


def _alone(settings: PipelineSettings) -> PipelineSettings:
    """The settings as one Job has them, which is one worker with all of its cards."""
    resources = settings.resources.model_copy(update={"workers": 1})
    kubernetes = settings.kubernetes.model_copy(update={"efa": 0})
    return settings.model_copy(update={"resources": resources, "kubernetes": kubernetes})


def _metrics_port(settings: PipelineSettings, step: str) -> int | None:
    """Where the pods of a step serve their figures."""
    return {"train": settings.training.metrics_port, "finetune": settings.finetune.metrics_port}.get(step)


def training_placement(settings: PipelineSettings) -> PodPlacement:
    """Where training pods may run; `kubernetes.node_selector` is for those that train alone."""
    placement = settings.kubernetes.training_pods
    selector = {**settings.kubernetes.node_selector, **placement.node_selector}
    return placement.model_copy(update={"node_selector": selector})


def _place(settings: PipelineSettings, step: str, item: Manifest) -> None:
    kubernetes, (first, *workers) = settings.kubernetes, pod_templates(item)
    if not STEPS[step].trains:
        place_pod(kubernetes.data_pods, first)
        return
    placement = training_placement(settings) if STEPS[step].distributed else kubernetes.training_pods
    place_pod(placement, first, chooses_node=not workers)
    for template in workers:
        place_pod(placement, template)


def _share_out(item: Manifest, pods: int) -> None:
    """Let `pods` pods do an indexed step, each its part, and with retries for each where the Job counts them together."""
    spec = item["spec"]
    if "backoffLimit" in spec:
        spec["backoffLimit"] = spec["backoffLimit"] // spec["completions"] * pods
    spec["completions"] = spec["parallelism"] = pods
    set_option(next(pod_specs(item))["containers"][0], "--shard", f"$(JOB_COMPLETION_INDEX)/{pods}")


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
