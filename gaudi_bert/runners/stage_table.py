"""The stages of a pipeline, one row per stage: what every runner, and waiting between them, knows of a stage.

A stage has one or more steps: where its parts must be put together, that is a second step.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from gaudi_bert import __version__
from gaudi_bert.artefacts.mirrored_folder import existing_histograms, exists, local_copy
from gaudi_bert.artefacts.plan import Plan
from gaudi_bert.artefacts.work_folder import SplitPaths, WorkFolder
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import BUILT_IN_ROWS, BUILT_IN_TEXTS
from gaudi_bert.common.files import is_in_store, resolve_location
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.values import EngineName

Kustomization = Literal["data", "training", "finetuning", "results"]
KUSTOMIZATIONS: tuple[Kustomization, ...] = get_args(Kustomization)
Paths = Callable[[WorkFolder], list[Path]]


@dataclass(frozen=True)
class Stage:
    """One row of the table.

    Attributes:
        name: as in `--stages`.
        makes: the file of each of its products that is written last, so that its presence proves the product complete.
        trains: whether it runs the model: in the training image, on cards where there are any.
        kustomization: the folder below `k8s/` that holds its Job.
        needs: the stages whose products must exist before it starts.
        follows: the stages that it also waits for where all are started at once.
        reads: the settings that name files which it reads.
        shared: whether many machines may do it together, each its part.
        parts: the products of its parts, where a second step finishes it; None where nothing has to be finished.
        parallel: whether it uses `resources.data_processes` processes or threads.
        distributed: whether all workers and cards of `resources` do it together, as one training.
        is_finished: whether a product exists.
        is_part_of: whether a pipeline has it, by its settings or its work folder.
    """

    name: str
    makes: Paths
    trains: bool = False
    kustomization: Kustomization = "data"
    needs: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    reads: tuple[str, ...] = ("prepare.records", "prepare.evaluation_records")
    shared: bool = False
    parts: Paths | None = None
    parallel: bool = False
    distributed: bool = False
    is_finished: Callable[[Path, StoreSettings | None], bool] = exists
    is_part_of: Callable[[PipelineSettings | WorkFolder], bool] = lambda pipeline: pipeline.pretrains

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of its steps, in order."""
        return (self.name,) if self.parts is None else (self.name, f"{self.name}-finish")

    def missing_products(self, folder: WorkFolder) -> list[Path]:
        """The products that do not exist yet, on a disk or in a store."""
        products = self.makes(folder) if self.is_part_of(folder) else []
        return [path for path in products if not self.is_finished(path, folder.store)]


def _of_each_split(product: Callable[[SplitPaths], Path]) -> Paths:
    return lambda folder: [product(folder.split(name)) for name in folder.splits]


def _examples(folder: WorkFolder) -> list[Path]:
    return [] if folder.records is not None else [folder.examples_summary]


def _manifests(folder: WorkFolder) -> list[Path]:
    """Return the manifests of all groups; of a split without plan the plan, which counts the groups."""
    products = []
    for paths in map(folder.split, folder.splits):
        if not exists(paths.plan, folder.store):
            products.append(paths.plan)
            continue
        with local_copy(paths.plan, folder.store) as plan:
            products += [paths.manifest(group) for group in range(Plan.read(plan).totals.groups)]
    return products


def _unverified(folder: WorkFolder) -> list[Path]:
    """Return the verification of each split of which some part has not verified its groups."""
    paths = [folder.split(name).verification for name in folder.splits]
    return [path for path in paths if not existing_histograms(path, folder.store)]


_ROWS = (
    Stage("prepare", _examples, reads=("prepare.text", "prepare.vocab"), shared=True, parallel=True),
    Stage(
        "histogram",
        _of_each_split(lambda paths: paths.histogram),
        needs=("prepare",),
        shared=True,
        parallel=True,
        is_finished=lambda path, store: bool(existing_histograms(path, store)),
    ),
    Stage("plan", _of_each_split(lambda paths: paths.plan), needs=("histogram",), parallel=True),
    Stage(
        "write",
        _of_each_split(lambda paths: paths.metadata),
        needs=("plan",),
        shared=True,
        parts=_manifests,
        parallel=True,
    ),
    Stage(
        "verify",
        _of_each_split(lambda paths: paths.verification),
        needs=("write",),
        shared=True,
        parts=_unverified,
        parallel=True,
    ),
    Stage(
        "train",
        lambda folder: [folder.training_result],
        trains=True,
        kustomization="training",
        needs=("write",),
        follows=("verify",),
        distributed=True,
        reads=("prepare.records", "prepare.evaluation_records", "training.init_checkpoint"),
    ),
    # A training that was stopped can be evaluated, and any work folder reported on, as far as it has come.
    Stage(
        "evaluate",
        lambda folder: [folder.evaluation_result] if folder.has_evaluation else [],
        trains=True,
        kustomization="results",
        follows=("train",),
    ),
    Stage(
        "finetune",
        lambda folder: [folder.finetuning_result],
        trains=True,
        kustomization="finetuning",
        needs=("train",),
        reads=(
            *("finetune.data", "finetune.evaluation_data", "finetune.init_checkpoint", "finetune.vocab", "task.labels"),
            "prepare.records",  # for the vocabulary next to them
        ),
        distributed=True,
        is_part_of=lambda pipeline: pipeline.finetunes,
    ),
    Stage(
        "predict",
        lambda folder: [folder.predictions],
        trains=True,
        kustomization="finetuning",
        needs=("finetune",),
        reads=("predict.data",),
        is_part_of=lambda pipeline: pipeline.predicts,
    ),
    Stage(
        "report",
        lambda folder: [folder.report],
        kustomization="results",
        follows=("train", "evaluate", "finetune", "predict"),
        reads=(),
        is_part_of=lambda pipeline: True,
    ),
)

STAGES: Mapping[str, Stage] = MappingProxyType({stage.name: stage for stage in _ROWS})
STEPS: Mapping[str, Stage] = MappingProxyType({step: stage for stage in _ROWS for step in stage.steps})


def steps_of(stages: Iterable[str]) -> list[str]:
    """The steps of `stages`, in the pipeline's order."""
    chosen = set(stages)
    return [step for name, stage in STAGES.items() if name in chosen for step in stage.steps]


def stages_of(settings: PipelineSettings) -> list[str]:
    """The stages that a pipeline has, in order."""
    return [name for name, stage in STAGES.items() if stage.is_part_of(settings)]


def select_stages(settings: PipelineSettings, names: Iterable[str]) -> list[str]:
    """`names` in the pipeline's order; those that it does not have are refused."""
    own, chosen = stages_of(settings), list(names)
    remedies = {"finetune": "set finetune.data, and task.name", "predict": "set predict.data"}
    for name in chosen:
        if name not in STAGES:
            raise InputError(f"--stages {name}: no such stage; stages are {', '.join(STAGES)}")
        if name not in own:
            remedy = remedies.get(name, "leave out finetune.init_checkpoint where it is to pretrain its own weights")
            raise InputError(f"--stages {name}: this pipeline has only {', '.join(own)}; {remedy}")
    return [name for name in own if name in chosen]


# --- the files that stages read


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
    """List the inputs of `stages` that do not exist: each key with its path. Object stores are not searched."""
    read = {key for stage in stages for key in STAGES[stage].reads}
    missing = []
    for key, text in named_paths(settings):
        # Weights are relative to the current folder, all else to that of the pipeline file.
        path = Path(text) if key.endswith("init_checkpoint") else resolve_location(pipeline_folder, text)
        if key in read and not is_in_store(path) and not path.exists() and not glob.glob(f"{path}*"):
            missing.append(f"{key} = {text}: {path} does not exist")
    return missing


# --- images, and what a stage requests


def stage_image(settings: PipelineSettings, stage: Stage) -> str:
    """Return the image of `stage` as `registry/name:tag`; one that trains has one engine; the default tag is our version."""
    images, name = settings.images, settings.images.data
    if stage.trains:
        device = "gaudi" if settings.resources.cards else "cpu"
        engine = "-pytorch" if stage_engine(settings, stage) == "pytorch" else ""
        name = images.train or f"gaudi-bert-train-{device}{engine}"
    return f"{images.registry + '/' if images.registry else ''}{name}:{images.tag or __version__}"


def stage_engine(settings: PipelineSettings, stage: Stage) -> EngineName:
    """The engine of a stage in its image; one of a task has that of pretraining, unless `finetune.engine` names another."""
    own = settings.finetune.engine if stage.kustomization == "finetuning" else "auto"
    return settings.container_engine if own == "auto" else own


def preview_stage(settings: PipelineSettings, name: str) -> dict[str, Any]:
    """Return what the stage called `name` requests: cores, memory and cards are those of each of its containers."""
    stage, resources = STAGES[name], settings.resources
    pod = resources.training if stage.trains else resources.data
    return {
        "stage": name,
        "image": stage_image(settings, stage),
        "containers": resources.workers if stage.distributed else resources.data_workers if stage.shared else 1,
        "cpu": pod.cpu,
        "memory": pod.memory_limit or pod.memory,
        "cards": resources.cards if stage.distributed else min(resources.cards, 1) if stage.trains else 0,
    }


# --- quantities of cores and memory, as Kubernetes writes them

_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def quantity_value(quantity: str) -> float:
    """A Kubernetes quantity, as settings have it, as a number: cores, bytes or pieces."""
    unit = quantity.lstrip("0123456789.")
    return float(quantity.removesuffix(unit)) * _UNITS[unit]
