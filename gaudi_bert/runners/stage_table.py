"""The stages of a pipeline, one row per stage: what every runner, and waiting between them, knows of a stage.

A stage is made of one or more steps: where its parts are put together in the end, that is a step of its own. Adding a stage
means a method of `LocalRun` (`stage_calls.py`), one row here, and its Job below `k8s/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from gaudi_bert.artefacts.plan import Plan
from gaudi_bert.artefacts.store.copies import existing_histograms, exists, local_copy
from gaudi_bert.artefacts.work_folder import SplitPaths, WorkFolder
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.runners.stage_calls import LocalRun, StageResult

Kustomization = Literal["data", "training", "finetuning", "results"]
KUSTOMIZATIONS: tuple[Kustomization, ...] = get_args(Kustomization)
Paths = Callable[[WorkFolder], list[Path]]


@dataclass(frozen=True)
class Stage:
    """One row of the table.

    Attributes:
        name: as in `--stages`.
        call: does it in this process.
        makes: the file of each of its products that is written last, so that its presence means that the product is whole.
        image: which of the two images has what it needs; `training` has TensorFlow.
        kustomization: the folder below `k8s/` that holds its Job.
        needs: the stages whose products must exist before it starts.
        follows: the stages that it also waits for where all are started at once.
        reads: the settings that name files which it reads.
        shared: whether many machines may do it together, each its part.
        parts: what its parts make, where a step of its own finishes it; None where nothing has to be finished.
        parallel: whether it uses several processes or threads, `resources.data_processes` of them.
        distributed: whether all workers and cards of `resources` do it together, as one training.
        is_made: whether a product exists.
        is_part_of: whether a pipeline has it.
    """

    name: str
    call: Callable[[LocalRun], StageResult]
    makes: Paths
    image: Literal["data", "training"] = "data"
    kustomization: Kustomization = "data"
    needs: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    reads: tuple[str, ...] = ("prepare.records", "prepare.evaluation_records")
    shared: bool = False
    parts: Paths | None = None
    parallel: bool = False
    distributed: bool = False
    is_made: Callable[[Path, StoreSettings | None], bool] = exists
    is_part_of: Callable[[PipelineSettings], bool] = lambda settings: settings.pretrains

    @property
    def trains(self) -> bool:
        """Whether it runs the model: in the training image, on cards where there are any."""
        return self.image == "training"

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of its steps, in order."""
        return (self.name,) if self.parts is None else (self.name, f"{self.name}-finish")

    def missing_products(self, folder: WorkFolder) -> list[Path]:
        """What it makes and has not made yet, on a disk or in a store."""
        return [path for path in self.makes(folder) if not self.is_made(path, folder.store)]


def _of_each_split(product: Callable[[SplitPaths], Path]) -> Paths:
    return lambda folder: [product(folder.split(name)) for name in folder.splits]


def _examples(folder: WorkFolder) -> list[Path]:
    return [] if folder.records is not None else [folder.examples_summary]


def _groups(folder: WorkFolder) -> list[Path]:
    """The manifests of all groups, or the plans that say how many there are."""
    found = []
    for paths in map(folder.split, folder.splits):
        if not exists(paths.plan, folder.store):
            found.append(paths.plan)
            continue
        with local_copy(paths.plan, folder.store) as plan:
            found += [paths.manifest(number) for number in range(Plan.read(plan).group_count)]
    return found


_ROWS = (
    Stage("prepare", LocalRun.prepare, _examples, reads=("prepare.text", "prepare.vocab"), shared=True, parallel=True),
    Stage(
        "histogram",
        LocalRun.histogram,
        _of_each_split(lambda paths: paths.histogram),
        needs=("prepare",),
        shared=True,
        parallel=True,
        is_made=lambda path, store: bool(existing_histograms(path, store)),
    ),
    Stage(
        "plan",
        LocalRun.plan,
        _of_each_split(lambda paths: paths.plan),
        needs=("histogram",),
        shared=True,
        parallel=True,
    ),
    Stage(
        "write",
        LocalRun.write,
        _of_each_split(lambda paths: paths.metadata),
        needs=("plan",),
        shared=True,
        parts=_groups,
        parallel=True,
    ),
    Stage("verify", LocalRun.verify, _of_each_split(lambda paths: paths.verification), needs=("write",), parallel=True),
    Stage(
        "train",
        LocalRun.train,
        lambda folder: [folder.training_result] if folder.pretrains else [],
        image="training",
        kustomization="training",
        needs=("write",),
        follows=("verify",),
        distributed=True,
        reads=("prepare.records", "prepare.evaluation_records", "training.init_checkpoint"),
    ),
    # A training that was stopped can be evaluated, and any work folder reported on, as far as it has come.
    Stage(
        "evaluate",
        LocalRun.evaluate,
        lambda folder: [folder.evaluation_result] if folder.pretrains and folder.has_evaluation else [],
        image="training",
        kustomization="results",
        follows=("train",),
    ),
    Stage(
        "finetune",
        LocalRun.finetune,
        lambda folder: [folder.finetuning_result] if folder.finetunes else [],
        image="training",
        kustomization="finetuning",
        needs=("train",),
        reads=(
            *("finetune.data", "finetune.evaluation_data", "finetune.init_checkpoint", "finetune.vocab", "task.labels"),
            "prepare.records",  # for the vocabulary beside them
        ),
        distributed=True,
        is_part_of=lambda settings: settings.finetunes,
    ),
    Stage(
        "predict",
        LocalRun.predict,
        lambda folder: [folder.predictions] if folder.predicts else [],
        image="training",
        kustomization="finetuning",
        needs=("finetune",),
        reads=("predict.data",),
        is_part_of=lambda settings: settings.predicts,
    ),
    Stage(
        "report",
        LocalRun.report,
        lambda folder: [folder.report],
        kustomization="results",
        follows=("train", "evaluate", "finetune", "predict"),
        reads=(),
        is_part_of=lambda settings: True,
    ),
)

STAGES: Mapping[str, Stage] = MappingProxyType({stage.name: stage for stage in _ROWS})
STEPS: Mapping[str, Stage] = MappingProxyType({step: stage for stage in _ROWS for step in stage.steps})
SHARED_STAGES = tuple(stage.name for stage in _ROWS if stage.shared)


def select_stages(names: Iterable[str]) -> list[str]:
    """`names` in the pipeline's order."""
    chosen = list(names)
    unknown = [name for name in chosen if name not in STAGES]
    if unknown:
        raise InputError(f"--stages {unknown[0]}: no such stage; stages are {', '.join(STAGES)}")
    return [name for name in STAGES if name in chosen]


def steps_of(stages: Iterable[str]) -> list[str]:
    """The steps of `stages`, in the pipeline's order."""
    return [step for name in select_stages(stages) for step in STAGES[name].steps]


def stages_of(settings: PipelineSettings) -> list[str]:
    """The stages that a pipeline has, in order."""
    return [name for name, stage in STAGES.items() if stage.is_part_of(settings)]


def check_stages(settings: PipelineSettings, names: Iterable[str]) -> None:
    """Refuse stages that a pipeline does not have."""
    own = stages_of(settings)
    remedies = {"finetune": "set finetune.data, and task.name", "predict": "set predict.data"}
    for name in names:
        if name not in own:
            remedy = remedies.get(name, "leave out finetune.init_checkpoint where it is to pretrain its own weights")
            raise InputError(f"--stages {name}: this pipeline has only {', '.join(own)}; {remedy}")
