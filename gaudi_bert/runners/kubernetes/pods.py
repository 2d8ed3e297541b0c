"""What pods take from a pipeline: account, volumes, images, where they may run, their labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gaudi_bert.config import PipelineSettings, PodPlacement
from gaudi_bert.runners.images import image_reference
from gaudi_bert.runners.kubernetes.kustomize import Manifest

__all__ = [
    "DATA_FOLDER",
    "USER_NAME_FILE",
    "announce_metrics",
    "fill_pod",
    "needs_user_name",
    "place_pod",
    "pod_specs",
    "pod_templates",
    "set_option",
    "user_name_file",
    "work_claim_name",
]

DATA_FOLDER = "/data"
# Beside the pipeline in its ConfigMap, mounted as /etc/passwd.
USER_NAME_FILE = "passwd"
IMAGE_USER = 1000
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
    return settings.trains_as_mpijob and not settings.resources.cards and settings.kubernetes.user != IMAGE_USER


def user_name_file(settings: PipelineSettings) -> str:
    """An /etc/passwd with the one user of the pods."""
    user = settings.kubernetes.user
    return f"gaudi-bert:x:{user}:{user}::/tmp:/bin/sh\n"


def set_option(container: Manifest, option: str, value: str) -> None:
    """Set the value of an option that a container's command has."""
    command = container["command"]
    command[command.index(option) + 1] = value


def fill_pod(settings: PipelineSettings, spec: Manifest) -> None:
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
            set_option(container, "--timeout", str(kubernetes.wait_seconds))


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


def place_pod(placement: PodPlacement, template: Manifest, *, chooses_node: bool = True) -> None:
    """Say where a pod may run and how it is marked.

    Args:
        placement: what the pipeline says.
        template: the pod's.
        chooses_node: whether the pod needs such a node; False for one that only starts others.
    """
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


def announce_metrics(port: int, template: Manifest) -> None:
    """Say where a pod serves its figures: by a named port, and by the annotations that Prometheus' usual set-up reads."""
    said = {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}
    metadata = template["metadata"]
    metadata["annotations"] = {**said, **metadata.get("annotations", {})}
    template["spec"]["containers"][0]["ports"] = [{"name": "metrics", "containerPort": port}]
