"""What a pipeline needs where it runs: images, cores and memory, the files that it names, access to object stores."""

from __future__ import annotations

import glob
import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gaudi_bert import __version__
from gaudi_bert.artefacts.store.location import in_store, path_below
from gaudi_bert.common.features import BUILT_IN_ROWS, BUILT_IN_TEXTS
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import ImageSettings, PodResources, ResourceSettings, StoreSettings
from gaudi_bert.runners.stage_table import STAGES, Stage, stages_of

# --- images


def image_reference(images: ImageSettings, name: str) -> str:
    """`registry/name:tag` as container engines take it; unless the pipeline names a tag, it is this program's version."""
    prefix = f"{images.registry}/" if images.registry else ""
    return f"{prefix}{name}:{images.tag or __version__}"


def stage_image(images: ImageSettings, stage: Stage) -> str:
    """The full name of the image that `stage` runs in."""
    return image_reference(images, images.train if stage.trains else images.data)


@dataclass(frozen=True)
class _StagePreview:
    """What a stage would ask for (`--dry-run`).

    Cores, memory and cards are those of each container.
    """

    stage: str
    image: str
    containers: int
    cpu: str
    memory: str
    cards: int

    def __str__(self) -> str:
        count = f"{self.containers} x " if self.containers > 1 else ""
        cards = f", {self.cards} card{'s' if self.cards > 1 else ''}" if self.cards else ""
        return f"{self.stage}: {count}{self.image} ({self.cpu} cpu, {self.memory}{cards})"


def preview_stage(settings: PipelineSettings, name: str) -> _StagePreview:
    """What the stage called `name` would ask for."""
    stage, resources = STAGES[name], settings.resources
    pod = resources.training if stage.trains else resources.data
    return _StagePreview(
        stage=name,
        image=stage_image(settings.images, stage),
        containers=resources.workers if stage.distributed else resources.data_workers if stage.shared else 1,
        cpu=pod.cpu,
        memory=pod.memory_limit or pod.memory,
        cards=resources.cards if stage.distributed else min(resources.cards, 1) if stage.trains else 0,
    )


# --- resources. Quantities are strings, as Kubernetes writes them.
#
# With cards, requests equal limits in everything: extended resources and huge pages allow nothing else, and a pod whose
# cores and memory are its own is the last to be evicted. Without cards, cores are only requested, so that idle ones are
# used.

CARD_RESOURCE = "habana.ai/gaudi"
EFA_RESOURCE = "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"
_MEBIBYTE = 2**20
_UNITS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3}
_UNITS |= {letter: 1000.0**power for power, letter in enumerate(("k", "M", "G", "T", "P", "E"), 1)}
_UNITS |= {f"{letter}i": 1024.0**power for power, letter in enumerate(("K", "M", "G", "T", "P", "E"), 1)}


def quantity_value(quantity: str) -> float:
    """A Kubernetes quantity as a number: cores, bytes or pieces; a ValueError if it is not a quantity."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([A-Za-z]*)", quantity)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{quantity!r} is not a quantity")
    return float(match[1]) * _UNITS[match[2]]


def quantity_text(resource: str, value: float) -> str:
    """An amount of a resource as a person writes it: `2 cpu`, `409Gi memory`, `8 habana.ai/gaudi`."""
    if resource not in ("memory", HUGE_PAGES, "ephemeral-storage", "storage"):
        return f"{value:g} {resource}"
    unit, power = next(
        ((unit, power) for power, unit in ((4, "Ti"), (3, "Gi"), (2, "Mi"), (1, "Ki")) if value >= 1024**power), ("", 0)
    )
    return f"{round(value / 1024**power, 1):g}{unit} {resource}"


def pod_resources(pod: PodResources) -> dict[str, Any]:
    """The `resources` of a container without cards."""
    return {"requests": {"cpu": pod.cpu, "memory": pod.memory}, "limits": {"memory": pod.memory_limit or pod.memory}}


def training_resources(settings: PipelineSettings) -> dict[str, Any]:
    """The `resources` of a container that trains."""
    resources = settings.resources
    if not resources.cards:
        return pod_resources(resources.training)
    requests = {"cpu": resources.training.cpu, "memory": resources.training.memory, CARD_RESOURCE: str(resources.cards)}
    if quantity_value(resources.hugepages_2Mi):
        requests[HUGE_PAGES] = resources.hugepages_2Mi
    if settings.kubernetes.efa:
        requests[EFA_RESOURCE] = str(settings.kubernetes.efa)
    return {"requests": requests, "limits": dict(requests)}


def evaluation_resources(resources: ResourceSettings) -> dict[str, Any]:
    """The `resources` of evaluation: one card and its share of a training worker, or what training takes without cards."""
    if not resources.cards:
        return pod_resources(resources.training)
    memory = int(quantity_value(resources.training.memory) / resources.cards / _MEBIBYTE)
    cores = int(quantity_value(resources.training.cpu) * 1000 / resources.cards)
    requests = {
        "cpu": str(cores // 1000) if cores >= 1000 else f"{max(cores, 1)}m",
        "memory": f"{memory}Mi",
        CARD_RESOURCE: "1",
    }
    # Whole pages of 2 MiB.
    huge_pages = int(quantity_value(resources.hugepages_2Mi) / resources.cards / (2 * _MEBIBYTE)) * 2
    if huge_pages:
        requests[HUGE_PAGES] = f"{huge_pages}Mi"
    return {"requests": requests, "limits": dict(requests)}


# --- files


def named_paths(settings: PipelineSettings) -> Iterator[tuple[str, str]]:
    """Each key that names something that must exist before the run, and what it names (`prepare.text`: also a glob)."""
    for key in dict.fromkeys(key for stage in stages_of(settings) for key in STAGES[stage].reads):
        section, name = key.split(".")
        if key == "prepare.text" and settings.prepare.records is not None:
            continue
        if section == "prepare" and not settings.pretrains:
            continue
        value = getattr(getattr(settings, section), name)
        built_in = BUILT_IN_TEXTS if key == "prepare.text" else BUILT_IN_ROWS
        for text in (value,) if isinstance(value, str) else value or ():
            if text not in built_in:
                yield key, text


def missing_paths(settings: PipelineSettings, stages: Iterable[str], pipeline_folder: Path) -> list[str]:
    """What `stages` read and is not there: each key with its path. What lies in an object store is not looked for."""
    read = {key for stage in stages for key in STAGES[stage].reads}
    missing = []
    for key, text in named_paths(settings):
        # Weights are named from where the command is started, all else from where the pipeline file lies.
        path = Path(text) if key.endswith("init_checkpoint") else path_below(pipeline_folder, text)
        if key in read and not in_store(path) and not path.exists() and not glob.glob(f"{path}*"):
            missing.append(f"{key} = {text}: there is no {path}")
    return missing


# --- object stores: how the environment says where one is and who may use it.
#
# Only names are here. Values go from process to process, and into no file.

CREDENTIALS = ("AWS_*", "AZURE_*", "GOOGLE_*")
"""What ranks on other pods get of the launcher's environment; `stop_ranks` writes out the names that exist."""


class _StoreTools(NamedTuple):
    """What the tools of a store take from a machine.

    `prefixes` are those of the names of its variables, `files` those variables that name a file; its own tools keep log-ins
    in `folder`, below the home folder.
    """

    prefixes: tuple[str, ...]
    files: tuple[str, ...]
    folder: str


_AWS_FILES = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE")
_S3 = _StoreTools(("AWS_",), _AWS_FILES, ".aws")
_GCS = _StoreTools(("GOOGLE_", "CLOUDSDK_"), ("GOOGLE_APPLICATION_CREDENTIALS",), ".config/gcloud")
_AZURE = _StoreTools(("AZURE_",), ("AZURE_FEDERATED_TOKEN_FILE",), ".azure")
STORE_TOOLS: Mapping[str, _StoreTools] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}

# fsspec's own settings, for stores of every kind, and the way out of a network that has one.
_OF_ALL = ("FSSPEC_",)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def store_variables(scheme: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What of `environment` the library for URLs of `scheme` reads."""
    prefixes = (*_OF_ALL, *(STORE_TOOLS[scheme].prefixes if scheme in STORE_TOOLS else ()))
    return {name: value for name, value in environment.items() if name.startswith(prefixes) or name.upper() in _PROXIES}


def loopback_endpoint(settings: StoreSettings, environment: Mapping[str, str]) -> str | None:
    """The address of the S3 server, where that is this machine's own loopback."""
    url = settings.endpoint_url or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    host = urlsplit(url or "").hostname or ""
    try:
        return url if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return url if host == "localhost" or host.endswith(".localhost") else None
