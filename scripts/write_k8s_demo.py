#!/usr/bin/env python3
"""Writes what k8s/ holds of the demos: their pipeline files as each kustomization runs them, and the tags of the images.

Kustomize reads no file from outside a kustomization's folder, so each has a copy. `make k8s` writes them; with --check,
those that are not as they would be written are named, and the exit code is 1.

    scripts/write_k8s_demo.py [--check] [REPOSITORY]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import gaudi_bert

Change = tuple[str, str]  # A pattern that must be found once in the pipeline, and what stands there instead.

RESOURCES = r"^resources:\n(?:  .*\n)+"
TWO_DATA_PODS: tuple[Change, ...] = ((RESOURCES, "resources:\n  data_workers: 2\n"),)
IN_A_BUCKET: tuple[Change, ...] = (
    (
        RESOURCES,
        "resources:\n"
        "  data_workers: 2\n"
        "kubernetes:\n"
        "  store: s3://my-bucket/gaudi-bert\n"
        "  store_secret: object-store\n"
        "store:\n"
        "  cache_bytes: 512MiB  # half of a pod's scratch\n",
    ),
)
ON_CARDS: tuple[Change, ...] = (
    # An update has 32 sequences, about 16 packs: 2 for each of 8 cards.
    (r"\bmicro_batch_packs: \d+\b", "micro_batch_packs: 2"),
    (r"^  measure_speedup: true\n", ""),
    (
        RESOURCES,
        "resources:\n"
        "  cards: 8\n"
        "  data_workers: 2\n"
        "  training:\n"
        '    cpu: "95"\n'
        "    memory: 409Gi\n"
        "  hugepages_2Mi: 95000Mi\n"
        "  shared_memory: 16Gi\n"
        "  cores_per_process: 6\n"
        "  mpi_prefix: /opt/amazon/openmpi\n",
    ),
)
ON_GAUDI: tuple[Change, ...] = ((r"\bdevice: auto\b", "engine: tensorflow\n  device: hpu"), *ON_CARDS)
ON_GAUDI_BY_PYTORCH: tuple[Change, ...] = ((r"\bdevice: auto\b", "engine: pytorch\n  device: hpu"), *ON_CARDS)
COPIES: dict[str, tuple[str, tuple[Change, ...]]] = {
    "k8s/overlays/cpu/settings/pipeline.yaml": ("on two pods where stages can be shared out", TWO_DATA_PODS),
    "k8s/in-cluster/pipeline.yaml": (
        "on two pods where stages can be shared out; put your own pipeline here",
        TWO_DATA_PODS,
    ),
    "k8s/overlays/finetuning/settings/pipeline.yaml": ("on two pods where stages can be shared out", TWO_DATA_PODS),
    "k8s/overlays/object-store/settings/pipeline.yaml": ("in an object store", IN_A_BUCKET),
    "k8s/overlays/gaudi/settings/pipeline.yaml": ("on servers with 8 Gaudi2 cards each, by TensorFlow", ON_GAUDI),
    "k8s/overlays/gaudi-pytorch/settings/pipeline.yaml": (
        "on servers with 8 Gaudi cards each, by PyTorch",
        ON_GAUDI_BY_PYTORCH,
    ),
}
SOURCES = {"k8s/overlays/finetuning/settings/pipeline.yaml": "pipelines/finetune-demo.yaml"}
TAGGED = (
    "k8s/overlays/cpu/settings/kustomization.yaml",
    "k8s/overlays/object-store/settings/kustomization.yaml",
    "k8s/overlays/gaudi/settings/kustomization.yaml",
    "k8s/overlays/gaudi-pytorch/settings/kustomization.yaml",
    "k8s/overlays/finetuning/settings/kustomization.yaml",
    "k8s/in-cluster/kustomization.yaml",
)


def wanted_files(repository: Path) -> Iterator[tuple[Path, str]]:
    """Each file and what it has to hold."""
    for name, (where, changes) in COPIES.items():
        source = SOURCES.get(name, "pipelines/demo.yaml")
        demo = (repository / source).read_text(encoding="utf-8")
        # The first lines of the demo say what it is for.
        text = f"# {source} {where}. Written by `make k8s`.\n" + demo[demo.index("name:") :]
        for pattern, replacement in changes:
            text, found = re.subn(pattern, replacement, text, flags=re.MULTILINE)
            if found != 1:
                sys.exit(f"{source}: {pattern!r} is there {found} times, not once; correct {__file__}")
        yield repository / name, text
    for name in TAGGED:
        text = (repository / name).read_text(encoding="utf-8")
        yield repository / name, re.sub(r"(?<=newTag: ).*", gaudi_bert.__version__, text)


def main(arguments: list[str]) -> None:
    """Write the files, or with --check name those that differ."""
    check = "--check" in arguments
    folders = [argument for argument in arguments if argument != "--check"]
    repository = Path(folders[0]) if folders else Path(__file__).resolve().parent.parent
    different = [(path, text) for path, text in wanted_files(repository) if path.read_text(encoding="utf-8") != text]
    for path, text in different:
        print(path.relative_to(repository))  # noqa: T201
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and different:
        sys.exit("not as `make k8s` writes them; run it")


if __name__ == "__main__":
    main(sys.argv[1:])
