"""The pods of a step, filled from a pipeline file: account, volumes, images, where they run, and how they are marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodPlacement
from gaudi_bert.runners.stage_table import STEPS, stage_image

Manifest = dict[str, Any]

DATA_FOLDER = "/data"


def fill_pods(settings: PipelineSettings, step: str, item: Manifest) -> None:
    """Fill the pods of a step's Job or MPIJob, whose containers have their commands and resources."""
    for spec in pod_specs(item):
        _fill_pod(settings, step, spec)
    _set_placement(settings, step, item)
    _use_store(settings, item)


def _fill_pod(settings: PipelineSettings, step: str, spec: Manifest) -> None:
    """What all pods take from the pipeline: account, volumes, images, how long to wait."""
    kubernetes, images = settings.kubernetes, settings.images
    spec["serviceAccountName"] = f"{settings.name}-{spec['serviceAccountName']}"
    if spec["securityContext"].get("runAsNonRoot"):
        spec["securityContext"] |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), kubernetes.user)
    if images.pull_secret:
        spec["imagePullSecrets"] = [{"name": images.pull_secret}]
    _fill_volumes(settings, spec)
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container["image"] = stage_image(settings, STEPS[step])
        container["imagePullPolicy"] = images.pull_policy
        if kubernetes.data_claim and "volumeMounts" in container:
            container["volumeMounts"].append({"name": "data", "mountPath": DATA_FOLDER, "readOnly": True})
        if container["name"] == "wait":
            set_option(container, "--timeout", str(kubernetes.wait_seconds))


def _fill_volumes(settings: PipelineSettings, spec: Manifest) -> None:
    for volume in spec["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = f"{settings.name}-pipeline"
        if "persistentVolumeClaim" in volume:
            volume["persistentVolumeClaim"]["claimName"] = work_claim_name(settings)
        if volume["name"] == "shared-memory":
            volume["emptyDir"]["sizeLimit"] = settings.resources.shared_memory
        if volume["name"] == "scratch":
            volume["emptyDir"]["sizeLimit"] = settings.kubernetes.scratch
            for container in spec["containers"]:
                container["resources"]["requests"]["ephemeral-storage"] = settings.kubernetes.scratch
    if settings.kubernetes.data_claim:
        claim = {"claimName": settings.kubernetes.data_claim, "readOnly": True}
        spec["volumes"].append({"name": "data", "persistentVolumeClaim": claim})


def _fill_placement(placement: PodPlacement, template: Manifest, *, chooses_node: bool = True) -> None:
    """Set where a pod may run and how it is marked; `chooses_node` is False for one that only starts others."""
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
    # Our own labels, by which pods are selected, cannot be replaced.
    metadata["labels"] = {**placement.labels, **metadata["labels"]}
    if placement.annotations:
        metadata["annotations"] = {**metadata.get("annotations", {}), **placement.annotations}


def training_placement(settings: PipelineSettings) -> PodPlacement:
    """Where training pods may run; `kubernetes.node_selector` is for those that train alone."""
    placement = settings.kubernetes.training_pods
    selector = {**settings.kubernetes.node_selector, **placement.node_selector}
    return placement.model_copy(update={"node_selector": selector})


def _set_placement(settings: PipelineSettings, step: str, item: Manifest) -> None:
    kubernetes, (first, *workers) = settings.kubernetes, _pod_templates(item)
    if not STEPS[step].trains:
        _fill_placement(kubernetes.data_pods, first)
        return
    placement = training_placement(settings) if STEPS[step].distributed else kubernetes.training_pods
    _fill_placement(placement, first, chooses_node=not workers)
    for template in workers:
        _fill_placement(placement, template)


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


def set_option(container: Manifest, option: str, value: str) -> None:
    """Give an option of a container's command another value."""
    command = container["command"]
    command[command.index(option) + 1] = value


def _pod_templates(item: Manifest) -> Iterator[Manifest]:
    """The pod templates of a Job, a TrainingRuntime or an MPIJob (launcher, then workers); a TrainJob has none itself."""
    if item["kind"] == "TrainingRuntime":
        yield from (job["template"]["spec"]["template"] for job in item["spec"]["template"]["spec"]["replicatedJobs"])
    elif item["kind"] == "MPIJob":
        for replica in ("Launcher", "Worker"):
            yield item["spec"]["mpiReplicaSpecs"][replica]["template"]
    elif item["kind"] == "Job":
        yield item["spec"]["template"]


def pod_specs(item: Manifest) -> Iterator[Manifest]:
    """The pod specs of what has pod templates."""
    for template in _pod_templates(item):
        yield template["spec"]


def work_claim_name(settings: PipelineSettings) -> str:
    """The claim of the volume that holds the work folder: the one that the pipeline names, or its own."""
    return settings.kubernetes.work_claim or f"{settings.name}-work"
