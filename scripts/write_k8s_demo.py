#!/usr/bin/env python3
"""Render the manifests of the demos below k8s/: a folder in `overlays/` for each pipeline, and the pipeline of
`in-cluster/`.

`make k8s` runs this script after a change to the pipelines, the manifests or the version. With --check, the script only
lists the files that are out of date, and ends with exit code 1 if there are any.

    scripts/write_k8s_demo.py [--check] [REPOSITORY]
"""

from __future__ import annotations

import filecmp
import re
import shutil
import sys
import tempfile
from pathlib import Path

import yaml
from k8s_serving import serving

import gaudi_bert
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import write_manifests
from gaudi_bert.runners.stage_table import list_pipeline_stages

TWO_DATA_PODS = ["resources.data_workers=2"]
TWO_WORKERS = ["resources.workers=2", "kubernetes.access_mode=ReadWriteMany"]
# Servers with 8 Gaudi2 cards. An update has 32 sequences, which are about 16 packs, or 2 packs per card.
CARDS = [
    *(*TWO_DATA_PODS, "resources.cards=8", "resources.training={cpu: '95', memory: 409Gi}"),
    *("resources.hugepages_2Mi=95000Mi", "resources.shared_memory=16Gi", "resources.cores_per_process=6"),
    *("training.device=hpu", "training.micro_batch_packs=2", "training.measure_speedup=false"),
]
# Release 1.14.0 of the Gaudi software, the last release with TensorFlow.
TENSORFLOW = [*CARDS, "training.engine=tensorflow", "resources.mpi_prefix=/opt/amazon/openmpi"]
DL1 = ["kubernetes.efa=4", "resources.training={cpu: '95', memory: 690Gi}", "resources.hugepages_2Mi=42000Mi"]
# An example of a bucket and its credentials. Users render the manifests again for their own bucket.
BUCKET = ["kubernetes.store=s3://my-bucket/gaudi-bert", "kubernetes.store_secret=object-store"]

# The overlays, and the settings that each changes in its pipeline file.
OVERLAYS: dict[str, list[str]] = {
    "cpu": TWO_DATA_PODS,
    "cpu-nodes": [*TWO_DATA_PODS, *TWO_WORKERS, "training.engine=pytorch"],
    "cpu-mpijob": [*TWO_DATA_PODS, *TWO_WORKERS],
    "finetuning": TWO_DATA_PODS,
    "object-store": [*TWO_DATA_PODS, *BUCKET],
    "gaudi": TENSORFLOW,
    "gaudi-mpijob": [*TENSORFLOW, *TWO_WORKERS],
    "gaudi-mpijob-efa": [*TENSORFLOW, *TWO_WORKERS, *DL1],
    "gaudi-pytorch": [*CARDS, "training.engine=pytorch"],
    "gaudi-pytorch-nodes": [*CARDS, *TWO_WORKERS, "training.engine=pytorch"],
}
PIPELINES = {"finetuning": "finetune-demo"}
# The overlays that also serve a model, and the image that serves it.
SERVING = {"cpu": "gaudi-bert-train-cpu-pytorch", "gaudi-pytorch": "gaudi-bert-train-gaudi-pytorch"}


def write_all(repository: Path, folder: Path) -> None:
    """Render all files below `folder` as they should be below k8s/ of `repository`."""
    for overlay, overrides in OVERLAYS.items():
        pipeline = repository / "pipelines" / f"{PIPELINES.get(overlay, 'demo')}.yaml"
        # The last Gaudi software with TensorFlow runs on Kubernetes 1.24 and 1.25, so render the overlays for version 1.24
        # and later.
        settings = load_pipeline(pipeline, overrides)
        write_manifests(settings, list_pipeline_stages(settings), folder / "overlays" / overlay)
        if overlay in SERVING:
            _write_serving(folder / "overlays" / overlay, f"{SERVING[overlay]}:{gaudi_bert.__version__}")
    demo = (repository / "pipelines" / "demo.yaml").read_text(encoding="utf-8")
    resources = re.sub(r"^resources:\n(?:  .*\n)+", "resources:\n  data_workers: 2\n", demo, flags=re.MULTILINE)
    head = "# Rendered by `make k8s` from pipelines/demo.yaml: put your own pipeline here.\n"
    (folder / "in-cluster").mkdir(parents=True)
    (folder / "in-cluster" / "pipeline.yaml").write_text(head + resources[resources.index("name:") :], encoding="utf-8")
    kustomization = (repository / "k8s" / "in-cluster" / "kustomization.yaml").read_text(encoding="utf-8")
    tagged = re.sub(r"(?<=newTag: ).*", gaudi_bert.__version__, kustomization)
    (folder / "in-cluster" / "kustomization.yaml").write_text(tagged, encoding="utf-8")


def _write_serving(overlay: Path, image: str) -> None:
    """Write the manifests that serve a model, in addition to those of its training."""
    files = (overlay / "training" / "train.yaml", overlay / "base" / "persistentvolumeclaim.yaml")
    train, claim = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in files)
    (overlay / "serving").mkdir()
    for name, item in serving(train, claim, image).items():
        text = yaml.dump(item, Dumper=_NoAliases, sort_keys=False, width=120)
        (overlay / "serving" / name).write_text(f"# Rendered by `make k8s`.\n{text}", encoding="utf-8")


class _NoAliases(yaml.SafeDumper):
    """A YAML dumper that writes repeated values again instead of using aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main(arguments: list[str]) -> None:
    """Write the files. With --check, only list the files that differ, are missing, or are no longer rendered."""
    folders = [argument for argument in arguments if argument != "--check"]
    repository = Path(folders[0]) if folders else Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as scratch:
        write_all(repository, Path(scratch))
        written = {path.relative_to(scratch) for path in Path(scratch).rglob("*.yaml")}
        old = {path.relative_to(repository / "k8s") for path in (repository / "k8s").rglob("*.yaml")}
        # Remove files in the overlays that are no longer rendered.
        stale = {path for path in old - written if path.parts[0] == "overlays" and path.parts[1] in OVERLAYS}
        different = {
            path
            for path in written
            if path not in old or not filecmp.cmp(Path(scratch, path), repository / "k8s" / path, shallow=False)
        }
        for path in sorted(different | stale):
            print(path)  # noqa: T201
        if "--check" in arguments:
            sys.exit("not as `make k8s` writes them; run it" if different | stale else 0)
        for path in stale:
            (repository / "k8s" / path).unlink()
        for path in different:
            (repository / "k8s" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(scratch, path), repository / "k8s" / path)


if __name__ == "__main__":
    main(sys.argv[1:])
