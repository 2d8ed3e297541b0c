"""Run the stages of a pipeline in this process, one after another, or wait until the inputs of a stage exist.

`run_stages` runs stages, and `RunRequest` has one method per stage. Each method imports the modules of its stage only when
it is called, because the data image contains neither PyTorch nor TensorFlow. A stage does nothing if its product already
exists. If a stage trains in several processes, `training_processes.py` starts them.

`wait_for_inputs` runs in the init container of each Kubernetes Job, because Kubernetes does not start the Jobs of a pipeline
in order.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from gaudi_bert.artefacts.mirrored_folder import file_exists, find_histogram_files, open_local_copy
from gaudi_bert.artefacts.results import PlainResult, StageOutput, StageRun
from gaudi_bert.artefacts.training import FineTuning, TrainingResult
from gaudi_bert.artefacts.work_folder import DataSplitPaths, WorkFolder
from gaudi_bert.common.errors import FailedError, InputError, require_libraries
from gaudi_bert.common.features import BUILT_IN_ROWS
from gaudi_bert.common.files import format_location, is_in_store, resolve_location, write_text
from gaudi_bert.common.launch import detect_launcher
from gaudi_bert.common.progress import Reporter, format_seconds
from gaudi_bert.config.options import check_option_combination
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.stage_table import STAGES, STEPS, select_stages
from gaudi_bert.runners.training_processes import run_training_processes

if TYPE_CHECKING:  # some of these modules import numpy, which this module does not need at run time
    from gaudi_bert.tasks.prediction_files import StreamResult
    from gaudi_bert.training.run_plan import DryRun

    SplitResult = StageOutput[Any] | PlainResult
    # Some stages process the splits `train` and `evaluation` separately. Their result is a mapping from splits to results.
    StageResult = Mapping[str, SplitResult] | SplitResult | DryRun | StreamResult


class _FinetuningFiles(NamedTuple):
    """The paths or URLs of the files that fine-tuning reads.

    Attributes:
        data: The training rows.
        evaluation_data: The evaluation rows, or None.
        model: The weights that fine-tuning starts from.
        vocabulary: The file or folder with the vocabulary, or None.
    """

    data: Path
    evaluation_data: Path | None
    model: Path
    vocabulary: Path | None


@dataclass(frozen=True)
class RunRequest:
    """A requested run of a pipeline. It has one method per stage, which runs the stage in this process.

    Attributes:
        settings: The settings of the pipeline.
        work: The folder that contains the work folders of all pipelines, or its URL.
        pipeline_folder: The folder of the pipeline file. Relative paths in the pipeline file start from this folder.
        options: The options that apply to every stage. Their store settings are replaced by those of `settings`.
    """

    settings: PipelineSettings
    work: Path
    pipeline_folder: Path
    options: StageRun

    @property
    def work_folder(self) -> WorkFolder:
        """The work folder of this pipeline."""
        return WorkFolder.from_settings(self.settings, self.work, self.pipeline_folder)

    @property
    def _options_with_store_settings(self) -> StageRun:
        """The options of the run, with the object store settings of the pipeline filled in."""
        return replace(self.options, store=self.settings.store)

    def _find_input_file(self, setting: str, path_text: str) -> Path:
        """Return the location of an input file. A relative path is resolved against the pipeline file's folder.

        Args:
            setting: The setting that names the file, for the error message.
            path_text: The path or URL in this setting.

        Raises:
            InputError: The location is a local path that does not exist.
        """
        path = resolve_location(self.pipeline_folder, path_text)
        if not is_in_store(path) and not path.exists():
            raise InputError(f"{setting} = {path}: the file or folder does not exist; check the path")
        return path

    def _find_rows_file(self, setting: str, path_text: str, split: str) -> Path:
        """Return the location of a file with task rows. Built-in rows are read from a file in the work folder."""
        return self.work_folder.rows_path(split) if path_text in BUILT_IN_ROWS else self._find_input_file(setting, path_text)

    def _run_for_each_split(self, run_split: Callable[[DataSplitPaths], SplitResult]) -> StageResult:
        """Call `run_split` with the paths of each split, and return the results by split name."""
        return {name: run_split(self.work_folder.data_split_paths(name)) for name in self.work_folder.data_split_names}

    # --- data

    def run_prepare_stage(self) -> StageResult:
        """Convert the text to examples. Do nothing if the pipeline uses existing records."""
        from gaudi_bert.corpus.prepare import prepare_examples

        if self.work_folder.records is not None:
            records = str(self.settings.prepare.records)
            return PlainResult([f"nothing to do, because the pipeline uses the records {records}"], {"records": records})
        return prepare_examples(
            self.settings.prepare,
            self.work_folder.examples_folder,
            self._options_with_store_settings,
            pipeline_folder=self.pipeline_folder,
        )

    def run_histogram_stage(self) -> StageResult:
        """Count the examples of each length, separately for each split."""
        from gaudi_bert.tfrecords.plan import count_records

        return self._run_for_each_split(
            lambda paths: count_records(paths.records, paths.histogram, self._options_with_store_settings, numbered=True)
        )

    def run_plan_stage(self) -> StageResult:
        """Compute the packing plan of each split from its histogram."""
        from gaudi_bert.tfrecords.plan import plan_packs

        def make(paths: DataSplitPaths) -> SplitResult:
            histograms = find_histogram_files(paths.histogram, self.settings.store)
            return plan_packs(histograms, paths.plan, self.settings.packing, self._options_with_store_settings)

        return self._run_for_each_split(make)

    def run_write_stage(self) -> StageResult:
        """Pack the examples of each split according to its plan, and write the packs."""
        from gaudi_bert.tfrecords.write import write_packed_records

        return self._run_for_each_split(
            lambda paths: write_packed_records(paths.records, paths.plan, paths.packed, self._options_with_store_settings)
        )

    def run_verify_stage(self) -> StageResult:
        """Check that the packs of each split contain every example exactly once."""
        from gaudi_bert.tfrecords.verify import verify_records

        return self._run_for_each_split(
            lambda paths: verify_records(paths.records, paths.packed, self._options_with_store_settings)
        )

    # --- training and tasks

    def run_train_stage(self) -> StageResult:
        """Pretrain the model on the packs, in this process or in several processes on this machine."""
        folder = self.work_folder
        data = folder.data_split_paths("train").packed
        evaluation_data = folder.data_split_paths("evaluation").packed if folder.has_evaluation else None
        if _must_start_processes(self.settings):
            files = {"--data": data, "--evaluation-data": evaluation_data, "--out": folder.train_folder}
            _run_stage_in_processes(self.settings, "train", files, ["--overwrite" if self.options.overwrite else "--resume"])
            with open_local_copy(folder.training_result_path, self.settings.store) as path:
                return StageOutput(TrainingResult.read(path))

        # A process that only starts other processes must not load TensorFlow or PyTorch, so import this module late.
        from gaudi_bert.runs.records import train

        return train(
            self.settings,
            data=data,
            evaluation_data=evaluation_data,
            out=folder.train_folder,
            reporter=self.options.reporter,
            resume=not self.options.overwrite,
            overwrite=self.options.overwrite,
        )

    def run_evaluate_stage(self) -> StageResult:
        """Evaluate the model on packed and on unpacked evaluation data. Do nothing if there are no evaluation data."""
        from gaudi_bert.training.evaluate import evaluate

        folder = self.work_folder
        if not folder.has_evaluation:
            self.options.reporter.say("evaluate: nothing to do, because the pipeline has no evaluation data")
            return PlainResult(["nothing to do, because the pipeline has no evaluation data"], {})
        return evaluate(
            data=folder.data_split_paths("evaluation").packed,
            checkpoint=folder.train_folder,
            unpacked=folder.data_split_paths("evaluation").records,
            out=folder.evaluation_result_path,
            reporter=self.options.reporter,
            store=self.settings.store,
            engine=self.settings.training.engine,
        )

    def run_finetune_stage(self) -> StageResult:
        """Fine-tune the model on the rows of the task, in this process or in several processes on this machine."""
        self._write_built_in_dataset()
        folder, settings, task = self.work_folder, self.settings, self.settings.task
        if task.labels is not None:  # the started processes get a copy of the pipeline file in another folder
            task = task.model_copy(update={"labels": str(self._find_input_file("task.labels", task.labels))})
            settings = settings.model_copy(update={"task": task})
        found = self._find_finetuning_files()
        if _must_start_processes(settings):
            files = {"--data": found.data, "--evaluation": found.evaluation_data, "--model": found.model}
            files |= {"--vocab": found.vocabulary, "--out": folder.finetune_folder}
            _run_stage_in_processes(settings, "finetune", files, ["--overwrite"] if self.options.overwrite else [])
            return StageOutput(FineTuning.read(folder.finetuning_result_path))

        from gaudi_bert.runs.finetune import finetune
        from gaudi_bert.runs.labelled_data import FineTuneFiles

        return finetune(
            settings,
            FineTuneFiles(*found),
            folder.finetune_folder,
            reporter=self.options.reporter,
            overwrite=self.options.overwrite,
        )

    def _write_built_in_dataset(self) -> None:
        """Write the built-in task rows to the work folder, if the pipeline uses them."""
        names = (self.settings.finetune.data, self.settings.finetune.evaluation_data, self.settings.predict.data)
        if any(name in BUILT_IN_ROWS for name in names):
            from gaudi_bert.tasks.task_data import write_built_in_dataset

            train, evaluation = self.work_folder.rows_path("train"), self.work_folder.rows_path("evaluation")
            write_built_in_dataset(
                train, evaluation, self.settings.task.name, reporter=self.options.reporter, overwrite=self.options.overwrite
            )

    def _find_finetuning_files(self) -> _FinetuningFiles:
        """Return the locations of the files that fine-tuning reads.

        Raises:
            InputError: A local file or folder does not exist.
        """
        finetune, folder = self.settings.finetune, self.work_folder
        data = self._find_rows_file("finetune.data", str(finetune.data), "train")
        evaluation_data = None
        if finetune.evaluation_data is not None:
            evaluation_data = self._find_rows_file("finetune.evaluation_data", finetune.evaluation_data, "evaluation")
        vocabulary = None if finetune.vocab is None else self._find_input_file("finetune.vocab", finetune.vocab)
        if finetune.init_checkpoint is None:
            # If `finetune.vocab` is not set, read the vocabulary from the folder that contains the examples. If the pipeline
            # uses existing records, this is the parent folder of the records.
            own = folder.examples_folder if folder.records is None else folder.records.parent
            return _FinetuningFiles(data, evaluation_data, folder.train_folder, vocabulary or own)
        # The checkpoint may be a URL, a folder, a file, or the prefix of a TF1 checkpoint. As in the stage `train`, a
        # relative path is resolved against the current folder.
        model = Path(finetune.init_checkpoint)
        if not is_in_store(model) and not model.exists() and not any(model.parent.glob(f"{model.name}.*")):
            raise InputError(f"finetune.init_checkpoint = {model}: the file or folder does not exist; check the path")
        return _FinetuningFiles(data, evaluation_data, model, vocabulary)

    def run_predict_stage(self) -> StageResult:
        """Compute predictions for the rows of the task with the fine-tuned model."""
        from gaudi_bert.tasks.predict import predict
        from gaudi_bert.tasks.prediction_files import PredictOptions

        settings = self.settings.predict
        return predict(
            self.work_folder.finetune_folder,
            str(self._find_rows_file("predict.data", str(settings.data), "evaluation")),
            str(self.work_folder.predictions_path),
            PredictOptions(settings.max_sequence_length, settings.precision),
            self.settings.task.model_dump(include={"format", "delimiter", "encoding", "on_bad_row"}, exclude_unset=True),
            reporter=self.options.reporter,
            overwrite=self.options.overwrite,
            store=self.settings.store,
        )

    def run_report_stage(self) -> StageResult:
        """Write an HTML report about the results in the work folder."""
        from gaudi_bert.reporting.report import report

        return report(self.work_folder.root, store=self.settings.store)


def _must_start_processes(settings: PipelineSettings) -> bool:
    """Return whether this process must start the training processes itself.

    This is the case if the settings request several processes and no launcher, such as mpirun, has started this process.
    """
    return settings.resources.workers * settings.resources.processes_per_worker > 1 and detect_launcher() is None


def _run_stage_in_processes(
    settings: PipelineSettings, stage: str, path_options: Mapping[str, Path | None], extra_options: Sequence[str]
) -> None:
    """Run a training stage in several processes on this machine. Each process runs `gaudi-bert train` or `finetune`.

    Args:
        settings: The settings of the pipeline, which are written to a temporary pipeline file.
        stage: The name of the stage and of its command, `train` or `finetune`.
        path_options: Command-line options and their paths. Options whose path is None are left out.
        extra_options: Further arguments of the command.
    """
    options = [text for option, path in path_options.items() if path is not None for text in (option, str(path))]
    with tempfile.TemporaryDirectory(prefix="gaudi-bert-") as folder:
        pipeline = Path(folder) / f"{settings.name}.yaml"
        write_text(pipeline, yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True), sort_keys=False))
        command = [sys.executable, "-m", "gaudi_bert", stage, "--pipeline", str(pipeline), *options, *extra_options]
        run_training_processes(settings, stage, command)


# --- running stages one after another

_TASK_STAGES = frozenset({"finetune", "predict"})
# These stages need an optional library, which is checked before the first stage runs.
_STAGE_LIBRARIES = {"prepare": "tokenizers", "report": "matplotlib"}


def run_stages(request: RunRequest, stages: Sequence[str]) -> dict[str, StageResult]:
    """Run stages in the order of the pipeline, and return the result of each stage by name.

    Raises:
        InputError: The pipeline does not contain a stage, a library is not installed, or the input of a stage is missing or
            wrong.
    """
    _check_shard_options(request, stages)
    stages = select_stages(request.settings, stages)
    require_libraries(_required_libraries(request.settings, stages), "this run")
    if _TASK_STAGES.intersection(stages) and is_in_store(request.work_folder.root):
        raise InputError(
            f"--work {format_location(request.work_folder.root)}: the stages finetune and predict need a work folder on "
            "this machine; pass the path of a local folder (rows and weights may be URLs)"
        )
    results: dict[str, StageResult] = {}
    for name in stages:
        request.options.reporter.say(f"--- {name}")
        for needed in STAGES[name].needs:
            for path in STAGES[needed].list_missing_outputs(request.work_folder):
                raise InputError(f"{format_location(path)}: this file does not exist; run the stage `{needed}` first")
        results[name] = getattr(request, f"run_{name}_stage")()
    return results


def _required_libraries(settings: PipelineSettings, stages: Sequence[str]) -> Iterator[str]:
    """Yield the optional libraries that the stages need."""
    for name in stages:
        if name in _STAGE_LIBRARIES:
            yield _STAGE_LIBRARIES[name]
        if STAGES[name].runs_model:
            engine = settings.finetune.engine if name in _TASK_STAGES else settings.training.engine
            if engine == "auto":
                engine = "pytorch" if find_spec("tensorflow") is None else "tensorflow"
            yield "torch" if engine == "pytorch" else engine


def _check_shard_options(request: RunRequest, stages: Sequence[str]) -> None:
    """Check that `--shard` and `--finish` are used only with a single stage that supports the option.

    Raises:
        InputError: The stages do not support the option, or `--finish` is combined with `--overwrite`.
    """
    shared = [stage.name for stage in STAGES.values() if stage.is_shardable]
    if request.options.part is not None and (len(stages) != 1 or stages[0] not in shared):
        raise InputError(
            f"--shard: must be used with exactly one stage that can run in parts; pass --stages {' or '.join(shared)}"
        )
    finished = [stage.name for stage in STAGES.values() if stage.part_paths is not None]
    if request.options.finish and (len(stages) != 1 or stages[0] not in finished):
        raise InputError(
            f"--finish: must be used with exactly one stage that combines its parts; pass --stages {' or '.join(finished)}"
        )
    check_option_combination({"--finish": request.options.finish, "--overwrite": request.options.overwrite})


# --- waiting

_POLL_SECONDS = 2.0
_SAY_EVERY_SECONDS = 60.0


def _list_missing_inputs(work_folder: WorkFolder, step: str) -> list[Path]:
    """Return the input files of a step that do not exist yet.

    Args:
        work_folder: The work folder, on a disk or in an object store.
        step: The name of a stage, or of a step that combines the parts of a stage, such as `write-finish`.

    Raises:
        InputError: There is no such step.
    """
    if step not in STEPS:
        raise InputError(f"--for {step}: unknown stage; choose one of {', '.join(STEPS)}")
    stage = STEPS[step]
    if stage.part_paths is not None and step != stage.name:
        missing = [path for path in stage.part_paths(work_folder) if not file_exists(path, work_folder.store)]
    else:
        missing = [
            path for name in (*stage.needs, *stage.follows) for path in STAGES[name].list_missing_outputs(work_folder)
        ]
    return list(dict.fromkeys(missing))


def wait_for_inputs(
    work_folder: WorkFolder,
    step: str,
    timeout_seconds: float,
    reporter: Reporter,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Wait until all input files of a step exist, and return the waiting time in seconds.

    Args:
        work_folder: The work folder, on a disk or in an object store.
        step: The name of a stage, or of a step that combines the parts of a stage, such as `write-finish`.
        timeout_seconds: The longest time to wait.
        reporter: Shows what is missing, once a minute.
        sleep: Replaces `time.sleep`, for tests.
        clock: Replaces `time.monotonic`, for tests.

    Raises:
        InputError: There is no such step.
        FailedError: An input is still missing after the timeout.
    """
    started = last_message = clock()
    while missing := _list_missing_inputs(work_folder, step):
        waited = clock() - started
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if waited >= timeout_seconds:
            raise FailedError(
                f"{format_location(missing[0])}{others}: waited {format_seconds(waited)}, but the input of {step} is "
                "still missing; find out why the previous stage did not finish, then run the same command again"
            )
        if waited == 0 or clock() - last_message >= _SAY_EVERY_SECONDS:
            last_message = clock()
            reporter.say(f"{step}: waiting for {format_location(missing[0])}{others}")
        sleep(min(_POLL_SECONDS, timeout_seconds - waited))
    return clock() - started
