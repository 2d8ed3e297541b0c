"""The manifests of `k8s/`, filled from a pipeline file: what `--on kubernetes` submits and `--render` writes.

The kustomizations hold the shape of every object; this module, with `steps` and `pods` beside it, sets what a pipeline
decides: names, namespace, images, how many pods share a stage, resources, the training command, volumes. `k8s/overlays/`
are the same manifests filled by kustomize for the demo; the tests hold both to the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

import yaml

from gaudi_bert.artefacts.store.location import in_store
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.kubernetes.kustomize import Manifest, build
from gaudi_bert.runners.kubernetes.object_store import cache_bytes, use_store
from gaudi_bert.runners.kubernetes.pods import DATA_FOLDER, USER_NAME_FILE, needs_user_name, user_name_file
from gaudi_bert.runners.kubernetes.steps import fill_step
from gaudi_bert.runners.named_paths import named_paths
from gaudi_bert.runners.stage_table import stages_of, steps_of

__all__ = ["FAILURE_POLICY_SINCE", "PIPELINE_LABEL", "Manifests", "render"]

PIPELINE_LABEL = "app.kubernetes.io/instance"
# The first version of Kubernetes that knows podFailurePolicy and backoffLimitPerIndex without being told to.
FAILURE_POLICY_SINCE = (1, 29)
# By which the MPI operator marks the pods of an MPIJob.
_MPIJOB_LABEL = "training.kubeflow.org/job-name"
# Paths that mean the same inside every container.
_MOUNTED = (DATA_FOLDER, "/work")


@dataclass(frozen=True)
class Manifests:
    """All objects of a pipeline.

    Attributes:
        namespace: the Namespace; it is the cluster's, not the pipeline's.
        shared: what all stages use: ServiceAccount, PersistentVolumeClaim, ConfigMap; of an MPIJob its NetworkPolicy.
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
    network = ("training-network",) if settings.has_network_policy else ()
    tasks = ("finetuning",) if settings.finetunes else ()
    objects = build(("base", "data", training, *network, *tasks, "results"), _components(settings, server_version))
    found = {item["metadata"]["name"]: item for item in objects if item["kind"] in ("Job", "MPIJob")}
    steps = {step: found[step] for step in steps_of(stages_of(settings))}
    others = {item["kind"]: item for item in objects if item["kind"] not in ("Job", "MPIJob")}
    others["ConfigMap"] = _configuration(settings)
    for step, item in steps.items():
        fill_step(settings, step, item)
        use_store(settings, item)
    _fill_claim(settings, others["PersistentVolumeClaim"])
    if "NetworkPolicy" in others:
        _fill_network_policy(settings, others["NetworkPolicy"])
    for item in (*others.values(), *steps.values()):
        _set_names(settings, item)
    namespace = others.pop("Namespace")
    if settings.kubernetes.work_claim or settings.kubernetes.store:
        del others["PersistentVolumeClaim"]
    return Manifests(namespace, tuple(others.values()), steps)


def _components(settings: PipelineSettings, server_version: tuple[int, int] | None) -> list[str]:
    policy = settings.kubernetes.failure_policy
    if policy == "auto":
        policy = server_version is None or server_version >= FAILURE_POLICY_SINCE
    wanted = {
        "components/evaluate-as-root": settings.resources.cards,
        "components/gaudi": settings.resources.cards,
        "components/efa": settings.kubernetes.efa,
        "components/failure-policy": policy,
        "components/scratch": True,
    }
    return [component for component, needed in wanted.items() if needed]


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
                f"{key} = {path}: no such place in a container; put it on a volume, name that volume's claim in "
                f"kubernetes.data_claim, and write the path as {DATA_FOLDER}/..."
            )
        if PurePosixPath(path).is_relative_to(DATA_FOLDER) and not settings.kubernetes.data_claim:
            raise InputError(f"{key} = {path}: needs a volume at {DATA_FOLDER}; name its claim in kubernetes.data_claim")


def _configuration(settings: PipelineSettings) -> Manifest:
    """The ConfigMap with the pipeline file; only what was set is written, so that it reads like the file."""
    values = settings.model_dump(mode="json", exclude_unset=True)
    if settings.kubernetes.store and cache_bytes(settings) < settings.store.cache_bytes:
        values["store"] = {**values.get("store", {}), "cache_bytes": cache_bytes(settings)}
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
    more = {USER_NAME_FILE: user_name_file(settings)} if needs_user_name(settings) else {}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "pipeline", "labels": {"app.kubernetes.io/name": "gaudi-bert"}},
        "data": {"pipeline.yaml": text} | more,
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


def _fill_network_policy(settings: PipelineSettings, item: Manifest) -> None:
    """Name the MPIJob whose pods may reach one another; its figures are for whoever asks."""
    (rule,) = item["spec"]["ingress"]
    for selector in (item["spec"]["podSelector"], *(source["podSelector"] for source in rule["from"])):
        selector["matchLabels"][_MPIJOB_LABEL] = f"{settings.name}-{selector['matchLabels'][_MPIJOB_LABEL]}"
    if settings.training.metrics_port is not None:
        item["spec"]["ingress"].append({"ports": [{"port": settings.training.metrics_port, "protocol": "TCP"}]})
