"""Every pipeline and every variant of it that the manifests know, as settings that suit a cluster."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.config import PipelineSettings, load_pipeline

ROOT = Path(__file__).resolve().parent.parent.parent
PIPELINES = sorted((ROOT / "pipelines").glob("*.yaml"))

CARDS = ["resources.cards=8", "resources.training={cpu: '95', memory: 409Gi}", "resources.hugepages_2Mi=95000Mi"]
MPIJOB = ["resources.workers=4", "kubernetes.training=mpijob"]
VARIANTS: dict[str, list[str]] = {
    "as it is": [],
    "mpijob": MPIJOB,
    "cards": [*CARDS, "resources.workers=1"],
    "cards and mpijob": [*CARDS, *MPIJOB],
    "cards, mpijob and EFA": [*CARDS, *MPIJOB, "kubernetes.efa=4"],
    "two cards": [*CARDS, "resources.cards=2", "resources.workers=3"],
    "shared out": ["resources.data_workers=7", "kubernetes.access_mode=ReadWriteMany", "kubernetes.storage_class=nfs"],
    "own claims": ["kubernetes.user=4711", "kubernetes.work_claim=ours", "kubernetes.data_claim=corpus"],
    "environment": [*CARDS, *MPIJOB, "resources.environment={LOG_LEVEL_ALL: '3'}", "resources.cores_per_process=6"],
    "registry": ["images.registry=registry.example:5000/team", "images.tag=v1", "images.pull_secret=mine"],
    "nodes": [*CARDS, "kubernetes.node_selector={kind: gaudi2}"],
}
# Files of a user's machine become files of a volume.
MOVED = ("text", "records", "evaluation_records", "vocab")


def cluster_settings(pipeline: Path, variant: str, *more: str) -> PipelineSettings:
    """A pipeline in one variant, its text and records on a volume if it names any."""
    prepare = load_pipeline(pipeline).prepare
    moved = [
        f"prepare.{key}=/data/{key}"
        for key in MOVED
        if getattr(prepare, key) is not None and getattr(prepare, key) != "python-docs"
    ]
    claim = ["kubernetes.data_claim=corpus"] if moved else []
    return load_pipeline(pipeline, [*moved, *claim, *VARIANTS[variant], *more])
