"""Every pipeline and every variant of it that the manifests know, as settings that suit a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runners.kubernetes.manifests import Manifests

ROOT = Path(__file__).resolve().parent.parent.parent
PIPELINES = sorted((ROOT / "pipelines").glob("*.yaml"))

CARDS = ["resources.cards=8", "resources.training={cpu: '95', memory: 409Gi}", "resources.hugepages_2Mi=95000Mi"]
WORKERS = ["resources.workers=4", "kubernetes.access_mode=ReadWriteMany"]
MPIJOB = [*WORKERS, "kubernetes.training=mpijob", "training.engine=tensorflow"]
NODES = [*WORKERS, "training.engine=pytorch"]
PLACED = [
    "kubernetes.data_pods={tolerations: [{operator: Exists}], labels: {team: text}, node_selector: {disk: fast}}",
    "kubernetes.training_pods.tolerations=[{key: gaudi, value: 'yes', effect: NoSchedule}]",
    "kubernetes.training_pods.priority_class=high",
    "kubernetes.training_pods.runtime_class=habana",
    "kubernetes.training_pods.annotations={example.org/owner: me}",
    "kubernetes.training_pods.affinity={podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: "
    "[{topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app.kubernetes.io/component: train-worker}}}]}}",
    "kubernetes.scratch=3Gi",
]
LIMITED = [
    *("resources.data.cpu_limit='1'", "resources.training.cpu_limit='2'", "kubernetes.request_scratch=false"),
    *("resources.waiting={cpu: 100m, cpu_limit: 200m, memory: 256Mi}", "resources.launcher.cpu_limit=200m"),
]
VARIANTS: dict[str, list[str]] = {
    "as it is": [],
    "mpijob": MPIJOB,
    "cards": [*CARDS, "resources.workers=1"],
    "cards and mpijob": [*CARDS, *MPIJOB],
    "cards, mpijob and EFA": [*CARDS, *MPIJOB, "kubernetes.efa=4"],
    "nodes": NODES,
    "nodes and cards": [*CARDS, *WORKERS],
    "open nodes in a queue": [*NODES, "kubernetes.network_policy=false", "kubernetes.queue=gpus"],
    "nodes of an object store": [*NODES, "kubernetes.store=s3://bucket/prefix", "kubernetes.store_secret=bucket"],
    "trainjob": [*CARDS, *WORKERS, "kubernetes.training=trainjob"],
    "shared out": ["resources.data_workers=7", "kubernetes.access_mode=ReadWriteMany", "kubernetes.storage_class=nfs"],
    "own claims": ["kubernetes.user=4711", "kubernetes.work_claim=ours", "kubernetes.data_claim=corpus"],
    "environment": [*CARDS, *MPIJOB, "resources.environment={LOG_LEVEL_ALL: '3'}", "resources.cores_per_process=6"],
    "registry": ["images.registry=registry.example:5000/team", "images.tag=v1", "images.pull_secret=mine"],
    "PyTorch, mpijob": [*MPIJOB, "training.engine=pytorch", "images.train=ours"],
    "mpijob of another user": [*MPIJOB, "kubernetes.user=4711"],
    "open mpijob in a queue": [*MPIJOB, "kubernetes.network_policy=false", "kubernetes.queue=gpus"],
    "object store": ["kubernetes.store=s3://bucket/prefix", "kubernetes.store_secret=bucket", "resources.data_workers=3"],
    "object store and mpijob": [*MPIJOB, "kubernetes.store=s3://bucket/prefix", "kubernetes.store_secret=bucket"],
    "placed": [*CARDS, *MPIJOB, *PLACED],
    "limited": [*MPIJOB, *LIMITED],
}
MAIN_VARIANTS = ("as it is", "mpijob", "cards, mpijob and EFA", "nodes and cards", "trainjob")


def cluster_settings(pipeline: Path, variant: str, *more: str) -> PipelineSettings:
    """A pipeline in one variant."""
    return load_pipeline(pipeline, [*VARIANTS[variant], *more])


def shared(manifests: Manifests, kind: str) -> dict[str, Any]:
    """The one object of a kind that the steps share."""
    (item,) = manifests.list_objects_shared_by_steps(kind)
    return item


def existing_claims(settings: PipelineSettings) -> list[str]:
    """The claims that the pipeline takes for granted."""
    claims = (settings.kubernetes.work_claim, settings.kubernetes.data_claim)
    return [claim for claim in claims if claim is not None]
