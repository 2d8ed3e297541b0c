"""The steps that all kinds of runs have in common, and the folder of a run.

A `Job` defines what distinguishes one kind of run from the others. The jobs are in `gaudi_bert/runs/`. `run_job` runs a job:
it chooses the engine, opens the folder, builds the model, resumes from the newest checkpoint, trains, and writes the result.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypedDict

import yaml
from typing_extensions import Required, Unpack

from gaudi_bert.artefacts.completion import (
    Signature,
    begin_artefact_unless_finished,
    check_output_path,
    is_artefact_finished,
    remove_artefact,
    settings_path,
)
from gaudi_bert.artefacts.mirrored_folder import (
    download_missing_files,
    format_path,
    is_mirrored,
    list_names,
    mirror_folder,
    remove_files,
)
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.common.arrays import WeightArrays
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock, explain_os_errors, read_json, write_json, write_text
from gaudi_bert.common.launch import detect_launcher, is_first_process, processes_share_folders
from gaudi_bert.common.processor import count_usable_cores
from gaudi_bert.common.progress import Reporter, redirect_native_output
from gaudi_bert.config.options import check_option_combination
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.config.sections import LoopSettings, TrainingSettings
from gaudi_bert.engines import ChosenEngine, choose_engine, load_engine
from gaudi_bert.engines.protocol import Engine, Model, ModelSpec
from gaudi_bert.training.batches import Batch, TrainingOrder
from gaudi_bert.training.checkpoint import (
    CHECKPOINT_NAMES,
    Progress,
    RunStartConditions,
    broadcast_state,
    read_run_start_conditions,
    restore_newest_checkpoint,
)
from gaudi_bert.training.evaluate import EvaluationSet
from gaudi_bert.training.logs import MlperfLog
from gaudi_bert.training.loop import R, RunContext, TrainingLoop
from gaudi_bert.training.objective import GLOBAL, Evaluation, LossDenominators, Objective, TrainingStep
from gaudi_bert.training.run_plan import DryRun, RunPlan, format_schedule


@dataclass(frozen=True)
class PlannedUpdates:
    """The plan of the weight updates of a run, and a function that returns the training batches.

    Attributes:
        plan: The plan of the run.
        objective: The loss to minimize.
        make_batches: A function that returns the training batches of a process from a position on. There are at least as
            many batches as the remaining updates need.
        lines: Lines for the user that describe the model, the data and the updates.
        packing: Values of the result that describe how the training data is packed, by name.
    """

    plan: RunPlan
    objective: Objective
    make_batches: Callable[[TrainingOrder], Iterator[Batch]]
    lines: Sequence[str]
    packing: Mapping[str, Any] = field(default_factory=dict)


class Job(ABC, Generic[R]):
    """One kind of run, such as pretraining. It defines the data, the model, the objective and the result of the run.

    All input files have been read and checked when a job is created. `run_job` calls the methods in the order of their
    definitions.

    Attributes:
        result_type: The type of the result. Its file is written last.
        evaluates_first: Whether the model is also evaluated before the first update.
        section: The settings of the training loop.
        spec: The config of the model, and its head.
        signature: Everything that the result depends on.
        evaluation: The held-out data, or None.
        denominators: The rule for the denominators of the loss sums.
        initial_variables: The pretrained initial weights of a new run, by variable name. Variables without such weights keep
            their random initial values.
        checkpoint_settings: Values that checkpoints contain in addition to the model config and the settings of the loop.
    """

    result_type: type[R]
    evaluates_first: ClassVar[bool] = False
    section: LoopSettings
    spec: ModelSpec
    signature: Signature
    evaluation: EvaluationSet[Any] | None
    denominators: LossDenominators = GLOBAL
    initial_variables: WeightArrays
    checkpoint_settings: Mapping[str, Any]

    @abstractmethod
    def plan_weight_updates(self, processes: int, initial_processes: int) -> PlannedUpdates:
        """Plan the weight updates of the run. Return the plan, and a function that reads the batches.

        This method does not change the job. It is called again if the run was begun by another number of processes, which is
        known only after the folder of the run was opened.

        Args:
            processes: The number of processes of the run.
            initial_processes: The number of processes that began the run. It decides which packs an update contains.

        Raises:
            InputError: The data and the settings do not fit together.
        """

    def format_dry_run(self) -> list[str]:
        """Return additional lines that only a dry run prints."""
        return []

    def begin_run(self, run: RunContext[R], plan: RunPlan, model: Model) -> MlperfLog | None:
        """Prepare the run after building the model and before loading weights. Return the MLPerf log of the run, or None if
        it has none.
        """
        return None

    def load_initial_weights(self, model: Model, reporter: Reporter) -> None:
        """Load the initial weights of a new run.

        Only the first process calls this.
        """
        model.load_variables(self.initial_variables)

    def save_if_best(self, run: RunContext[R], model: Model, update: int, evaluation: Evaluation) -> None:
        """Save the weights of the model if no earlier evaluation of the run was better. By default, do nothing.

        Every process calls this after each evaluation.
        """

    @abstractmethod
    def finish_run_and_build_result(self, loop: TrainingLoop, updates: PlannedUpdates) -> R:
        """Write the remaining files to the folder of the run, and return the result.

        Every process calls this.
        """


class RunOptions(TypedDict, total=False):
    """Options of a command that starts a run, such as `--resume` and `--overwrite`.

    A stopped run with the same settings always continues.

    Attributes:
        reporter: Shows messages and progress.
        resume: Also continue a run that had the same settings but fewer updates.
        overwrite: Remove the run that is in the folder, and begin a new one.
        dry_run: Print and return the plan of the run, and write nothing.
    """

    reporter: Required[Reporter]
    resume: bool
    overwrite: bool
    dry_run: bool


def run_job(
    create_job: Callable[[Reporter], Job[R]],
    settings: PipelineSettings,
    section: LoopSettings,
    out: Path,
    *,
    is_bert: bool,
    **options: Unpack[RunOptions],
) -> StageOutput[R] | DryRun:
    """Run a job in a folder. If the folder contains a stopped run of the same job, continue it.

    Args:
        create_job: Returns the job of the run. It is called once, after the user was told which engine computes the run, so
            that it may read large files.
        settings: The settings of the pipeline.
        section: The section of the settings that belongs to this kind of run.
        out: The folder of the run, on a disk or in an object store.
        is_bert: Whether the model is a BERT. Only PyTorch can run other models.
        **options: See `RunOptions`.

    Returns:
        The result, which is the same in every process, or the plan for a dry run.

    Raises:
        InputError: The settings, the data, the model and the stored run do not fit together.
        StoppedError: A signal requested a stop. A checkpoint has been saved.
        FailedError: The training diverged, or another process was lost.
    """
    reporter, dry_run = options["reporter"], options.get("dry_run", False)
    resume, overwrite = options.get("resume", False), options.get("overwrite", False)
    check_option_combination({"--resume": resume, "--overwrite": overwrite})
    with mirror_folder(Path(out), settings.store) as folder:
        chosen = _choose_run_engine(section, is_bert, folder, overwrite)
        say, reporter = reporter.say, reporter if is_first_process() else Reporter(quiet=True)
        launch = detect_launcher()
        processes = launch.size if launch is not None else 1
        if dry_run and processes == 1:  # without a launcher, plan for the number of processes in the settings
            processes = settings.resources.workers * settings.resources.processes_per_worker
        prefix = "" if dry_run else f"{'train' if section.section_name == 'training' else 'finetune'}: "
        reporter.say(f"{prefix}{chosen.format_choice()}")  # first, because what follows takes seconds to load
        job = create_job(reporter)
        updates = job.plan_weight_updates(processes, processes)
        plan, signature, result_path = updates.plan, job.signature, folder / job.result_type.file_name
        if plan.settings.target_masked_lm_accuracy is not None and job.evaluation is None:
            raise InputError(
                "training.target_masked_lm_accuracy: the setting requires evaluation data; pass --evaluation-data"
            )
        # If a pod is lost after the other pods have finished, Kubernetes restarts only this pod. The restarted pod would
        # wait in vain for the others to connect, so check first whether the run is finished.
        if not (overwrite or dry_run) and processes_share_folders() and is_artefact_finished(folder, result_path, signature):
            say(_format_already_finished_message(folder, signature))
            return StageOutput(job.result_type.read(result_path), skipped=True)
        for line in (*updates.lines, *((*format_schedule(plan), *job.format_dry_run()) if dry_run else ())):
            reporter.say(f"{prefix}{line}")
        if dry_run:
            return DryRun(plan)
        with _open_run_folder(
            job, folder, settings, load_engine(chosen.name), reporter, resume=resume, overwrite=overwrite
        ) as run:
            if run.finished_result is not None:
                return StageOutput(run.finished_result, skipped=True)
            if plan.packs_by_row_length and run.initial_processes != processes:
                updates = job.plan_weight_updates(processes, run.initial_processes)
            return StageOutput(run.write_and_broadcast_result(_train(job, updates, run)))


def _train(job: Job[R], prepared: PlannedUpdates, run: RunContext[R]) -> R:
    """Build the model, load the newest checkpoint or the initial weights, train, and return the result."""
    communicator, plan, settings = run.communicator, prepared.plan, prepared.plan.settings
    model = run.engine.build_model(job.spec, run.device, seed=settings.seed, compiled=run.compiled)
    updates = run.engine.create_updates(model, settings, communicator, plan.accumulation_steps)
    step = TrainingStep(updates, communicator, settings, prepared.objective, job.denominators)
    mlperf_log = job.begin_run(run, plan, model)
    progress = Progress()
    if communicator.is_first:  # continue from the newest checkpoint, or else load the initial weights
        progress = restore_newest_checkpoint(
            run.checkpoint_folder, model, updates, run.signature.as_json(), run.reporter.say
        )
        if progress.update == 0:
            job.load_initial_weights(model, run.reporter)
    progress = broadcast_state(progress, model, updates, communicator)
    rank, size = communicator.rank, communicator.size
    order = TrainingOrder(settings.seed, settings.shuffle_packs, rank, size, progress.packs, progress.update)
    # A run may be resumed with another engine or on another machine, so checkpoints contain no settings of this machine and
    # no paths.
    of_machine = {"engine", "device", "compile", "init_checkpoint"}
    fields = TrainingSettings.model_fields if isinstance(job.section, TrainingSettings) else LoopSettings.model_fields
    checkpoint_settings = {
        "model": job.spec.config.to_json(),
        "training": job.section.model_dump(mode="json", include=fields.keys() - of_machine),
        **job.checkpoint_settings,
        "compiled_kernels": run.compiled,
        "run": run.signature.as_json(),
    }
    loop = TrainingLoop(
        run,
        plan,
        step,
        model,
        prepared.make_batches(order),
        progress,
        checkpoint_settings,
        held_out=job.evaluation,
        mlperf_log=mlperf_log,
        handle_evaluation=partial(job.save_if_best, run, model),
        evaluates_first=job.evaluates_first,
    )
    loop.run()
    return job.finish_run_and_build_result(loop, prepared)


# --- The folder of a run, which is new, resumed or already finished
#
# Every process opens its device and connects to the others. The first process locks the folder, decides whether there is
# work to do, and writes all files: `settings.yaml` (the settings of the pipeline, which can be used again), `settings.json`
# (the signature), `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `engine.log` (the output of the framework itself) and,
# last, the result. If the folder is in an object store, files that grow are uploaded before each checkpoint, and all other
# files are uploaded when they are written.


@contextmanager
def _open_run_folder(
    job: Job[R],
    folder: Path,
    settings: PipelineSettings,
    engine: Engine,
    reporter: Reporter,
    *,
    resume: bool,
    overwrite: bool,
) -> Iterator[RunContext[R]]:
    """Connect the processes of a run and open its folder. Decide whether the run begins, continues or is already finished.

    Unless the run is already finished, lock the folder. Watch the processes of the run while the context is open. Every
    process calls this at the same time.

    Yields:
        The run. Its `finished_result` is set if the run is already finished.

    Raises:
        InputError: The folder contains another run or other files.
        FailedError: Another program is writing to the folder, or another process was lost.
    """
    section, signature, result_path = job.section, job.signature, folder / job.result_type.file_name
    communicator = engine.connect_processes(section, signature.to_flat_dict())
    threads = section.threads
    if threads is None and communicator.local_size > 1:  # divide the cores among the processes of a host
        threads = max(1, count_usable_cores() // communicator.local_size)
    device = engine.open_device(section, threads)
    with communicator.watch_processes_during_block(section) as watched, ExitStack() as stack:
        # The folder of a finished run may be read-only, and then it cannot be locked. So check for a result before locking
        # the folder.
        is_done = watched.run_on_first_process(
            lambda: not overwrite and is_artefact_finished(folder, result_path, signature)
        )
        if not is_done:
            watched.run_on_first_process(lambda: check_output_path(folder, result_path, signature.stage, overwrite))
            if watched.is_first:
                stack.enter_context(exclusive_lock(folder, str(folder)))
            chosen = settings.model_copy(update={section.section_name: section.model_copy(update={"engine": engine.NAME})})
            is_done = watched.run_on_first_process(
                lambda: _begin_unless_finished(result_path, signature, chosen, reporter, resume, overwrite)
            )
        context = RunContext[R](folder, result_path, engine, watched, reporter, device, signature)
        if is_done:
            reporter.say(_format_already_finished_message(folder, signature))
            yield replace(context, finished_result=watched.run_on_first_process(lambda: job.result_type.read(result_path)))
            return
        others = f", {watched.size} processes" if watched.size > 1 else ""
        reporter.say(f"{signature.stage}: on {device.description}{others}")
        for note in device.notes:
            reporter.say(note)
        if folder.is_dir():  # it may be missing on the hosts of other processes
            stack.enter_context(
                redirect_native_output(folder / ("engine.log" if watched.is_first else f"engine-{watched.rank}.log"))
            )
        # A resumed run must draw the dropout masks and divide the packs as if it had never been stopped. The masks depend on
        # whether kernels are compiled, and the division depends on the number of processes. Therefore use the values from
        # the start of the run.
        initial_processes, compiled = watched.run_on_first_process(
            lambda: read_run_start_conditions(context.checkpoint_folder)
        ) or RunStartConditions(watched.size, device.compiles)
        if compiled and not device.compiles:
            reporter.say(
                "note: the run began with compiled kernels, which this device does not support, so dropout masks differ "
                "from now on"
            )
        yield replace(context, compiled=compiled and device.compiles, initial_processes=initial_processes)


def _format_already_finished_message(folder: Path, signature: Signature) -> str:
    """Return the message for a run that is already finished."""
    done = "trained" if signature.stage == "train" else "fine-tuned"
    return f"{format_path(folder)}: already {done} with these settings; nothing to do"


# --- The engine of a run. `settings.yaml` in the folder records the engine that the run started with.


def _choose_run_engine(settings: LoopSettings, is_bert: bool, folder: Path, overwrite: bool) -> ChosenEngine:
    """Choose the engine for a run. A resumed run keeps its engine, unless the settings specify another one."""
    file = folder / "settings.yaml"
    download_missing_files(file)
    stored = None
    if file.is_file() and not overwrite:
        stored = getattr(load_pipeline(file), settings.section_name).engine
    return choose_engine(
        settings.engine,
        is_bert=is_bert,
        setting_name=f"{settings.section_name}.engine (--engine)",
        previous_engine=None if stored == "auto" else stored,
    )


def _begin_unless_finished(
    result_path: Path,
    signature: Signature,
    settings: PipelineSettings,
    reporter: Reporter,
    resume: bool,
    overwrite: bool,
) -> bool:
    """Return True if a run is already finished. Otherwise, prepare its folder for training, and return False.

    Raises:
        InputError: The folder contains another run, or a run with fewer updates while `resume` is False.
    """
    folder, settings_file = result_path.parent, settings_path(result_path.parent)
    download_missing_files(settings_file)
    if overwrite:
        check_output_path(folder, result_path, signature.stage, overwrite)
        remove_artefact(folder, result_path, signature.stage)
    before = _read_previous_update_count(settings_file, signature)
    if before is not None:
        updates = signature.settings["training"]["updates"]
        if not resume:
            raise InputError(
                f"{folder}: the run in this folder has training.updates = {before:,}; pass --resume to extend it to "
                f"{updates:,}, choose another folder, or pass --overwrite to start again"
            )
        # Even if the process is killed here, the folder must never contain a result that does not match its settings.
        # Therefore remove the result before writing the new settings.
        with explain_os_errors(result_path, "remove"):
            remove_files(result_path)
        write_json(settings_file, signature.as_json())
        reporter.say(
            f"train: training.updates was raised from {before:,} to {updates:,}; the optimizer keeps its moments, and the "
            f"learning rate continues on the schedule of {updates:,} updates"
        )
    if begin_artefact_unless_finished(folder, result_path, signature, overwrite=overwrite):
        return True
    write_text(folder / "settings.yaml", yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
    if is_mirrored(folder):  # resuming needs only the newest checkpoint and the files that grow
        names = list_names(folder)
        newest = max(fnmatch.filter(names, f"checkpoints/{CHECKPOINT_NAMES}"), default=None)
        download_missing_files(*(folder / name for name in names if "/" not in name or name == newest))
    return False


def _read_previous_update_count(settings_file: Path, requested_run: Signature) -> int | None:
    """If the requested run only adds updates to the stored run, return the stored number of updates.

    Return None if there is no stored run, or if it differs in another way.
    """
    requested = requested_run.as_json()
    updates = requested["settings"].get("training", {}).get("updates")
    if updates is None or not settings_file.exists():
        return None
    stored = read_json(settings_file)
    before = stored.get("settings", {}).get("training", {}).get("updates") if isinstance(stored, dict) else None
    if not isinstance(before, int) or before >= updates:
        return None
    requested["settings"]["training"]["updates"] = before
    return before if stored == requested else None
