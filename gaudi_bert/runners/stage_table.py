"""The table of pipeline stages: what each stage reads and writes, which stages it depends on, and which resources it uses.

All runners and `gaudi-bert wait` use this table. `STAGES` maps the name of a stage to its row. On a cluster, every stage is
one step. If several machines share a stage and their results must be combined afterwards, there is a second step that
combines them, such as `write-finish`. `STEPS` maps the name of a step to the row of its stage.

The module also lists the input files of a pipeline, and returns the image and the resources of a stage.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from gaudi_bert import __version__
from gaudi_bert.artefacts.mirrored_folder import file_exists, find_histogram_files, open_local_copy
from gaudi_bert.artefacts.plan import Plan
from gaudi_bert.artefacts.work_folder import DataSplitPaths, WorkFolder
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.features import BUILT_IN_ROWS, BUILT_IN_TEXTS
from gaudi_bert.common.files import is_in_store, resolve_location
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.config.values import EngineName

Kustomization = Literal["data", "training", "finetuning", "results"]
KUSTOMIZATIONS: tuple[Kustomization, ...] = get_args(Kustomization)
ListPaths = Callable[[WorkFolder], list[Path]]


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline, with its inputs, products, dependencies and resources.

    Attributes:
        name: The name, as in `--stages`.
        product_paths: A function that returns one path per product of the stage, for a work folder. A product is complete
            if the file with this path exists, because this file is written last.
        runs_model: Whether the stage runs the model. Such a stage uses the training image, and Gaudi cards if there are any.
        kustomization: The subfolder of the rendered manifests that contains the Job of the stage.
        needs: The stages whose products must exist before this stage starts.
        follows: Further stages that this stage waits for if all stages are started at the same time.
        input_settings: The settings that name the input files of this stage.
        is_shardable: Whether several machines can share the stage, so that each of them does one part.
        part_paths: A function that returns the products of all parts, for a work folder. It is None if no second step
            combines the parts.
        uses_data_processes: Whether the stage uses `resources.data_processes` processes or threads.
        is_distributed: Whether all workers and cards in `resources` run the stage together, as one training run.
        is_finished: A function that returns whether a product exists, for a path from `product_paths` and store settings.
        is_part_of: A function that returns whether a pipeline contains the stage, for its settings or its work folder.
    """

    name: str
    product_paths: ListPaths
    runs_model: bool = False
    kustomization: Kustomization = "data"
    needs: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    input_settings: tuple[str, ...] = ("prepare.records", "prepare.evaluation_records")
    is_shardable: bool = False
    part_paths: ListPaths | None = None
    uses_data_processes: bool = False
    is_distributed: bool = False
    is_finished: Callable[[Path, StoreSettings | None], bool] = file_exists
    is_part_of: Callable[[PipelineSettings | WorkFolder], bool] = lambda pipeline: pipeline.has_pretraining

    @property
    def step_names(self) -> tuple[str, ...]:
        """The names of the steps of this stage, in order."""
        return (self.name,) if self.part_paths is None else (self.name, f"{self.name}-finish")

    def list_missing_outputs(self, work_folder: WorkFolder) -> list[Path]:
        """Return the products of this stage that do not exist yet in a work folder."""
        products = self.product_paths(work_folder) if self.is_part_of(work_folder) else []
        return [path for path in products if not self.is_finished(path, work_folder.store)]


def _make_split_path_lister(split_path: Callable[[DataSplitPaths], Path]) -> ListPaths:
    """Return a function that lists one path per data split of a work folder, computed by `split_path`."""
    return lambda folder: [split_path(folder.data_split_paths(name)) for name in folder.data_split_names]


def _list_training_examples_summary_paths(folder: WorkFolder) -> list[Path]:
    """Return the path of the summary file that `prepare` writes next to the training examples.

    Return no path if the pipeline uses existing records.
    """
    return [] if folder.records is not None else [folder.examples_summary_path]


def _list_group_manifest_paths(folder: WorkFolder) -> list[Path]:
    """Return the paths of all group manifests. Each data split is packed in groups, and each group has a manifest.

    The number of groups is in the plan of the split. If a split has no plan yet, the path of the missing plan is returned
    instead of its manifests.
    """
    products = []
    for paths in map(folder.data_split_paths, folder.data_split_names):
        if not file_exists(paths.plan, folder.store):
            products.append(paths.plan)
            continue
        with open_local_copy(paths.plan, folder.store) as plan:
            products += [paths.manifest_path(group) for group in range(Plan.read(plan).totals.groups)]
    return products


def _list_unverified_split_paths(folder: WorkFolder) -> list[Path]:
    """Return the path of the verification result for each data split that is not completely verified yet."""
    paths = [folder.data_split_paths(name).verification_path for name in folder.data_split_names]
    return [path for path in paths if not find_histogram_files(path, folder.store)]


_ROWS = (
    Stage(
        "prepare",
        _list_training_examples_summary_paths,
        input_settings=("prepare.text", "prepare.vocab"),
        is_shardable=True,
        uses_data_processes=True,
    ),
    Stage(
        "histogram",
        _make_split_path_lister(lambda paths: paths.histogram),
        needs=("prepare",),
        is_shardable=True,
        uses_data_processes=True,
        is_finished=lambda path, store: bool(find_histogram_files(path, store)),
    ),
    Stage("plan", _make_split_path_lister(lambda paths: paths.plan), needs=("histogram",), uses_data_processes=True),
    Stage(
        "write",
        _make_split_path_lister(lambda paths: paths.metadata_path),
        needs=("plan",),
        is_shardable=True,
        part_paths=_list_group_manifest_paths,
        uses_data_processes=True,
    ),
    Stage(
        "verify",
        _make_split_path_lister(lambda paths: paths.verification_path),
        needs=("write",),
        is_shardable=True,
        part_paths=_list_unverified_split_paths,
        uses_data_processes=True,
    ),
    Stage(
        "train",
        lambda folder: [folder.training_result_path],
        runs_model=True,
        kustomization="training",
        needs=("write",),
        follows=("verify",),
        is_distributed=True,
        input_settings=("prepare.records", "prepare.evaluation_records", "training.init_checkpoint"),
    ),
    # `evaluate` and `report` also work with the checkpoints and results of an unfinished run, so they do not require that
    # `train` is complete.
    Stage(
        "evaluate",
        lambda folder: [folder.evaluation_result_path] if folder.has_evaluation else [],
        runs_model=True,
        kustomization="results",
        follows=("train",),
    ),
    Stage(
        "finetune",
        lambda folder: [folder.finetuning_result_path],
        runs_model=True,
        kustomization="finetuning",
        needs=("train",),
        input_settings=(
            *("finetune.data", "finetune.evaluation_data", "finetune.init_checkpoint", "finetune.vocab", "task.labels"),
            "prepare.records",  # because the vocabulary is next to the records
        ),
        is_distributed=True,
        is_part_of=lambda pipeline: pipeline.has_finetuning,
    ),
    Stage(
        "predict",
        lambda folder: [folder.predictions_path],
        runs_model=True,
        kustomization="finetuning",
        needs=("finetune",),
        input_settings=("predict.data",),
        is_part_of=lambda pipeline: pipeline.has_prediction,
    ),
    Stage(
        "report",
        lambda folder: [folder.report_path],
        kustomization="results",
        follows=("train", "evaluate", "finetune", "predict"),
        input_settings=(),
        is_part_of=lambda pipeline: True,
    ),
)

STAGES: Mapping[str, Stage] = MappingProxyType({stage.name: stage for stage in _ROWS})
STEPS: Mapping[str, Stage] = MappingProxyType({step: stage for stage in _ROWS for step in stage.step_names})


def list_steps_of_stages(stage_names: Iterable[str]) -> list[str]:
    """Return the names of all steps of the given stages, in pipeline order."""
    wanted = set(stage_names)
    return [step for name, stage in STAGES.items() if name in wanted for step in stage.step_names]


def list_pipeline_stages(settings: PipelineSettings) -> list[str]:
    """Return the names of all stages of a pipeline, in pipeline order."""
    return [name for name, stage in STAGES.items() if stage.is_part_of(settings)]


def select_stages(settings: PipelineSettings, names: Iterable[str]) -> list[str]:
    """Check the names of chosen stages, and return them in pipeline order.

    Raises:
        InputError: There is no stage with such a name, or the pipeline does not contain it.
    """
    own, chosen = list_pipeline_stages(settings), list(names)
    remedies = {"finetune": "set finetune.data and task.name", "predict": "set predict.data"}
    for name in chosen:
        if name not in STAGES:
            raise InputError(f"--stages {name}: unknown stage; choose from {', '.join(STAGES)}")
        if name not in own:
            remedy = remedies.get(name, "leave out finetune.init_checkpoint to pretrain its own weights")
            raise InputError(f"--stages {name}: this pipeline contains only the stages {', '.join(own)}; {remedy}")
    return [name for name in own if name in chosen]


# --- the files that stages read


class InputPath(NamedTuple):
    """The path or URL of an input file, and the setting that contains it.

    Attributes:
        setting: The setting, such as `finetune.data`.
        path: The path or URL. For `prepare.text` it may also be a glob.
    """

    setting: str
    path: str


def list_input_paths(settings: PipelineSettings) -> Iterator[InputPath]:
    """Yield the input files that must exist before a pipeline runs.

    Built-in texts and rows are left out.
    """
    for key in dict.fromkeys(key for stage in list_pipeline_stages(settings) for key in STAGES[stage].input_settings):
        section, name = key.split(".")
        if key == "prepare.text" and settings.prepare.records is not None:
            continue
        if section == "prepare" and not settings.has_pretraining:
            continue
        value = getattr(getattr(settings, section), name)
        built_in = BUILT_IN_TEXTS if key == "prepare.text" else BUILT_IN_ROWS
        for text in (value,) if isinstance(value, str) else value or ():
            if text not in built_in:
                yield InputPath(key, text)


def describe_missing_inputs(settings: PipelineSettings, stages: Iterable[str], pipeline_folder: Path) -> list[str]:
    """Return a message for each input file of the given stages that does not exist.

    Object stores are not searched, so a URL never counts as missing.

    Args:
        settings: The settings of the pipeline.
        stages: The names of the stages.
        pipeline_folder: The folder of the pipeline file.
    """
    read = {key for stage in stages for key in STAGES[stage].input_settings}
    missing = []
    for key, text in list_input_paths(settings):
        # The path of a checkpoint is relative to the current folder. All other paths are relative to the folder of the
        # pipeline file.
        path = Path(text) if key.endswith("init_checkpoint") else resolve_location(pipeline_folder, text)
        if key in read and not is_in_store(path) and not path.exists() and not glob.glob(f"{path}*"):
            missing.append(f"{key} = {text}: {path} does not exist")
    return missing


# --- the images and resources of a stage


def stage_image_name(settings: PipelineSettings, stage: Stage) -> str:
    """Return the name of the container image of a stage, as `registry/name:tag`.

    The tag defaults to the version of this package. For a stage that runs the model, the image depends on the engine and on
    the device.
    """
    images, name = settings.images, settings.images.data
    if stage.runs_model:
        device = "gaudi" if settings.resources.cards else "cpu"
        engine = "-pytorch" if stage_engine(settings, stage) == "pytorch" else ""
        name = images.train or f"gaudi-bert-train-{device}{engine}"
    return f"{images.registry + '/' if images.registry else ''}{name}:{images.tag or __version__}"


def stage_engine(settings: PipelineSettings, stage: Stage) -> EngineName:
    """Return the engine, TensorFlow or PyTorch, that a stage uses in a container.

    Fine-tuning and prediction use the engine of pretraining, unless `finetune.engine` names another engine.
    """
    own = settings.finetune.engine if stage.kustomization == "finetuning" else "auto"
    return settings.training_image_engine if own == "auto" else own


def preview_stage(settings: PipelineSettings, stage_name: str) -> dict[str, Any]:
    """Return the image and the resources of a stage for `gaudi-bert run --dry-run`.

    In the dictionary, `containers` is the number of containers. `cpu`, `memory` and `cards` are the resources of each
    container.
    """
    stage, resources = STAGES[stage_name], settings.resources
    pod = resources.training if stage.runs_model else resources.data
    return {
        "stage": stage_name,
        "image": stage_image_name(settings, stage),
        "containers": resources.workers if stage.is_distributed else resources.data_workers if stage.is_shardable else 1,
        "cpu": pod.cpu,
        "memory": pod.memory_limit or pod.memory,
        "cards": resources.cards if stage.is_distributed else min(resources.cards, 1) if stage.runs_model else 0,
    }


# --- Kubernetes quantities

_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def parse_quantity(quantity: str) -> float:
    """Return the value of a Kubernetes quantity, such as 0.5 for "500m" and 1024.0 for "1Ki".

    The settings have already checked the format. An unknown unit raises a `KeyError`.
    """
    unit = quantity.lstrip("0123456789.")
    return float(quantity.removesuffix(unit)) * _UNITS[unit]
