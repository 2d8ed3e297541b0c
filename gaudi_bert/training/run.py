"""The steps that all kinds of runs have in common, and the folder of a run.

A job defines what distinguishes one kind of run from the others: its data, model, objective, evaluation and result. The jobs
are in `gaudi_bert/runs/`. `run_job` runs a job: it chooses the engine, opens the folder, builds the model, resumes from the
newest checkpoint, trains, and writes the result.
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
    begin_artefact,
    check_output_place,
    is_artefact_finished,
    remove_artefact,
    settings_path,
)
from gaudi_bert.artefacts.mirrored_folder import (
    fetch_files,
    format_path,
    is_mirrored,
    list_names,
    mirror_folder,
    remove_files,
)
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock, explain_os_errors, read_json, write_json, write_text
from gaudi_bert.common.launch import find_launch, is_first_process, processes_share_folders
from gaudi_bert.common.progress import Reporter, redirect_native_output
from gaudi_bert.common.threads import usable_cores
from gaudi_bert.config.options import check_combination
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.config.sections import LoopSettings, TrainingSettings
from gaudi_bert.engines import ChosenEngine, choose_engine, load_engine
from gaudi_bert.engines.protocol import Communicator, Engine, Model, ModelSpec
from gaudi_bert.training.checkpoint import CHECKPOINT_NAMES, Progress, beginning_of, resume_run, share_state
from gaudi_bert.training.evaluate import EvaluationSet
from gaudi_bert.training.input import Batch, TrainingOrder
from gaudi_bert.training.logs import MlperfLog
from gaudi_bert.training.loop import R, RunContext, TrainingLoop
from gaudi_bert.training.objective import GLOBAL, Evaluation, LossDenominators, Objective, TrainingStep
from gaudi_bert.training.run_plan import RunPlan


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be run with a certain number of processes.

    Attributes:
        spec: The model to build.
        objective: The loss to minimize.
        plan: The plan of the run.
        evaluation: The held-out data, or None.
        batches: A function that returns the training batches of a process, given the plan and the position. There are at
            least as many batches as the remaining updates need.
        lines: Lines for the user that describe the model, the data and the batches.
        signature: Everything that the result depends on.
        denominators: The rule by which loss sums are divided.
        stored: Values that checkpoints contain besides the model config and the settings of the loop.
        details: A function that returns further lines for the user, in a dry run.
    """

    spec: ModelSpec
    objective: Objective
    plan: RunPlan
    evaluation: EvaluationSet[Any] | None
    batches: Callable[[RunPlan, TrainingOrder], Iterator[Batch]]
    lines: Sequence[str]
    signature: Signature
    denominators: LossDenominators = GLOBAL
    stored: Mapping[str, Any] = field(default_factory=dict)
    details: Callable[[], Sequence[str]] = tuple


class Job(ABC, Generic[R]):
    """One kind of run. `run_job` calls the methods in the order in which they are defined.

    Attributes:
        result_name: The name of the result file, which is written last.
        result_type: The type of the result.
        section: The settings of the training loop.
        is_bert: Whether the model is a BERT. Only PyTorch can run other models.
        evaluates_first: Whether the model is also evaluated before the first update.
    """

    result_name: ClassVar[str]
    result_type: type[R]
    section: LoopSettings
    is_bert: bool
    evaluates_first: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, processes: int, reporter: Reporter) -> Prepared:
        """Read the files, and decide on the model and the batches.

        This may be called again for another number of processes. The files are read only once.

        Args:
            processes: The number of processes of the run.
            reporter: Shows messages to the user.

        Raises:
            InputError: The files cannot be read, or the data, the model and the settings do not fit together.
        """

    def begin(self, run: RunContext[R], plan: RunPlan, model: Model) -> MlperfLog | None:
        """Do what the job needs after the model was built and before its weights are loaded.

        Returns:
            The MLPerf log of the run, or None.
        """
        return None

    @abstractmethod
    def load_start(self, model: Model, reporter: Reporter) -> None:
        """Load the weights with which a new run begins. Variables without such weights keep their initial values."""

    def evaluated(self, run: RunContext[R], model: Model, update: int, evaluation: Evaluation) -> None:
        """Handle the metrics of an evaluation after update `update`. Every process calls this."""

    @abstractmethod
    def finish(self, loop: TrainingLoop) -> R:
        """Write the remaining files of the folder, and return the result. Every process calls this."""


class RunOptions(TypedDict, total=False):
    """Options that decide whether a run begins, continues or is only planned.

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


def run_job(job: Job[R], settings: PipelineSettings, out: Path, **options: Unpack[RunOptions]) -> StageOutput[R] | RunPlan:
    """Run a job in a folder, from the beginning or from where it was stopped.

    Args:
        job: The job.
        settings: The settings of the pipeline.
        out: The folder of the run, on a disk or in an object store.
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
    check_combination({"--resume": resume, "--overwrite": overwrite})
    with mirror_folder(Path(out), settings.store) as folder:
        chosen = _engine_of(job, folder, overwrite)
        say, reporter = reporter.say, reporter if is_first_process() else Reporter(quiet=True)
        launch = find_launch()
        processes = launch.size if launch is not None else 1
        if dry_run and processes == 1:  # without a launcher, plan for the number of processes in the settings
            processes = settings.resources.workers * settings.resources.processes_per_worker
        prefix = "" if dry_run else f"{'train' if job.section.section_name == 'training' else 'finetune'}: "
        reporter.say(f"{prefix}{chosen.format_choice()}")  # first, because what follows takes seconds to load
        prepared = job.prepare(processes, reporter)
        plan, signature, result_path = prepared.plan, prepared.signature, folder / job.result_name
        if plan.settings.target_masked_lm_accuracy is not None and prepared.evaluation is None:
            raise InputError("training.target_masked_lm_accuracy: needs evaluation data; pass --evaluation-data")
        # If a pod is lost when the others are already done, it is restarted alone, and would wait in vain for the others to
        # connect. Therefore check whether the run is finished before connecting.
        if not (overwrite or dry_run) and processes_share_folders() and is_artefact_finished(folder, result_path, signature):
            say(_nothing_to_do(folder, signature))
            return StageOutput(job.result_type.read(result_path), skipped=True)
        for line in (*prepared.lines, *((*plan.details(), *prepared.details()) if dry_run else ())):
            reporter.say(f"{prefix}{line}")
        if dry_run:
            return plan
        engine = load_engine(chosen.name)
        communicator = engine.connect_processes(job.section, signature.to_flat_dict())
        opened = _run_folder(
            job, folder, signature, settings, engine, communicator, reporter, resume=resume, overwrite=overwrite
        )
        with opened as run:
            if run.stored is not None:
                return StageOutput(run.stored, skipped=True)
            return StageOutput(run.finish(_train(job, prepared, run)))


def _train(job: Job[R], prepared: Prepared, run: RunContext[R]) -> R:
    """Build the model, resume from the newest checkpoint or load the initial weights, train, and return the result."""
    communicator, plan = run.communicator, prepared.plan
    if run.begun_by != plan.processes and plan.rows:
        begun = job.prepare(run.begun_by, Reporter(quiet=True)).plan
        plan = replace(begun, processes=plan.processes, begun_by=run.begun_by)
    settings = plan.settings
    model = run.engine.build_model(prepared.spec, run.device, seed=settings.seed, compiled=run.compiled)
    updates = run.engine.create_updates(model, settings, communicator, plan.accumulation_steps)
    step = TrainingStep(updates, communicator, settings, prepared.objective, prepared.denominators)
    mlperf_log = job.begin(run, plan, model)
    progress = Progress()
    if communicator.is_first:  # continue from the newest checkpoint, or else load the initial weights
        progress = resume_run(run.checkpoints, model, updates, run.signature.as_json(), run.reporter.say)
        if progress.update == 0:
            job.load_start(model, run.reporter)
    progress = share_state(progress, model, updates, communicator)
    rank, size = communicator.rank, communicator.size
    order = TrainingOrder(settings.seed, settings.shuffle_packs, rank, size, progress.packs, progress.update)
    loop = TrainingLoop(
        run,
        plan,
        step,
        model,
        prepared.batches(plan, order),
        progress,
        _stored_settings(job.section, prepared, run),
        held_out=prepared.evaluation,
        mlperf_log=mlperf_log,
        evaluated=partial(job.evaluated, run, model),
        evaluates_first=job.evaluates_first,
    )
    loop.run()
    return job.finish(loop)


# Checkpoints do not contain these settings, because every engine on every machine can resume from them.
_OF_THE_MACHINE = ("engine", "device", "compile")


def _stored_settings(section: LoopSettings, prepared: Prepared, run: RunContext[R]) -> dict[str, Any]:
    """Return the settings that every checkpoint of a run contains. Paths on the user's machine are omitted."""
    fields = TrainingSettings.model_fields if isinstance(section, TrainingSettings) else LoopSettings.model_fields
    names = fields.keys() - {"init_checkpoint", *_OF_THE_MACHINE}
    return {
        "model": prepared.spec.config.to_json(),
        "training": section.model_dump(mode="json", include=names),
        **prepared.stored,
        "compiled_kernels": run.compiled,
        "run": run.signature.as_json(),
    }


# --- The folder of a run, which is new, resumed or already finished
#
# Every process opens its device and connects to the others. The first process locks the folder, decides whether there is
# work to do, and writes all files: `settings.yaml` (the settings of the pipeline, which can be used again), `settings.json`
# (the signature), `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `engine.log` (the output of the framework itself) and,
# last, the result. If the folder is in an object store, files that grow are uploaded before each checkpoint, and all other
# files are uploaded when they are written.


@contextmanager
def _run_folder(
    job: Job[R],
    folder: Path,
    signature: Signature,
    settings: PipelineSettings,
    engine: Engine,
    communicator: Communicator,
    reporter: Reporter,
    *,
    resume: bool,
    overwrite: bool,
) -> Iterator[RunContext[R]]:
    """Open the folder of a run to begin, continue or only read it, and watch the processes during the context.

    Every process calls this at the same time.

    Args:
        job: The job.
        folder: The folder of the run.
        signature: Everything that the result depends on.
        settings: The settings of the pipeline, for `settings.yaml`.
        engine: The engine of the run.
        communicator: The processes, before they are watched.
        reporter: Shows messages.
        resume: See `RunOptions`.
        overwrite: See `RunOptions`.

    Yields:
        The run. Its `stored` result is set if the run is already finished.

    Raises:
        InputError: The folder contains another run or other files.
        FailedError: Another program is writing to the folder, or another process was lost.
    """
    section, result_path = job.section, folder / job.result_name
    threads = section.threads
    if threads is None and communicator.local_size > 1:  # divide the cores among the processes of a host
        threads = max(1, usable_cores() // communicator.local_size)
    device = engine.open_device(section, threads)
    with communicator.watch_processes(section) as watched, ExitStack() as stack:
        # Locking would fail if a finished folder is read-only, so check for a result before locking.
        is_done = watched.run_on_first(lambda: not overwrite and is_artefact_finished(folder, result_path, signature))
        if not is_done:
            watched.run_on_first(lambda: check_output_place(folder, result_path, signature.stage, overwrite))
            if watched.is_first:
                stack.enter_context(exclusive_lock(folder, str(folder)))
            named = section.model_copy(update={"engine": engine.NAME})
            stored = settings.model_copy(update={section.section_name: named})
            is_done = watched.run_on_first(lambda: _begin(result_path, signature, stored, reporter, resume, overwrite))
        context = RunContext[R](folder, result_path, engine, watched, reporter, device, signature)
        if is_done:
            reporter.say(_nothing_to_do(folder, signature))
            yield replace(context, stored=watched.run_on_first(lambda: job.result_type.read(result_path)))
            return
        others = f", {watched.size} processes" if watched.size > 1 else ""
        reporter.say(f"{signature.stage}: on {device.description}{others}")
        for note in device.notes:
            reporter.say(note)
        if folder.is_dir():  # it may be missing on the hosts of other processes
            log = "engine.log" if watched.is_first else f"engine-{watched.rank}.log"
            stack.enter_context(redirect_native_output(folder / log))
        # Compiled dropout draws other masks, and another number of processes would divide the packs differently. Therefore
        # a resumed run continues with the choices with which it began.
        begun = watched.run_on_first(lambda: beginning_of(context.checkpoints))
        begun_by, compiled = begun or (watched.size, device.compiles)
        if compiled and not device.compiles:
            reporter.say("note: the run began with a compiled step, and here it is not; dropout masks differ from now on")
        yield replace(context, compiled=compiled and device.compiles, begun_by=begun_by)


def _nothing_to_do(folder: Path, signature: Signature) -> str:
    """Return the line that tells the user that a run is already finished."""
    done = "trained" if signature.stage == "train" else "fine-tuned"
    return f"{format_path(folder)}: already {done} with these settings, nothing to do"


# --- The engine of a run. `settings.yaml` in the folder contains the engine with which the run began.


def _engine_of(job: Job[R], folder: Path, overwrite: bool) -> ChosenEngine:
    """Choose the engine for a run in `folder`. A resumed run keeps its engine unless the settings specify another one."""
    settings, file = job.section, folder / "settings.yaml"
    fetch_files(file)
    stored = None
    if file.is_file() and not overwrite:
        stored = getattr(load_pipeline(file), settings.section_name).engine
    key = f"{settings.section_name}.engine (--engine)"
    return choose_engine(settings.engine, is_bert=job.is_bert, key=key, stored=None if stored == "auto" else stored)


def _begin(
    result_path: Path,
    signature: Signature,
    settings: PipelineSettings,
    reporter: Reporter,
    resume: bool,
    overwrite: bool,
) -> bool:
    """Prepare the folder to begin or continue a run, unless the run is already finished.

    Returns:
        Whether the run is already finished.

    Raises:
        InputError: The folder contains another run, or a run with fewer updates while `resume` is False.
    """
    folder, settings_file = result_path.parent, settings_path(result_path.parent)
    fetch_files(settings_file)
    if overwrite:
        check_output_place(folder, result_path, signature.stage, overwrite)
        remove_artefact(folder, result_path, signature.stage)
    before = _fewer_updates(settings_file, signature)
    if before is not None:
        updates = signature.settings["training"]["updates"]
        if not resume:
            raise InputError(
                f"{folder}: this run has training.updates = {before:,}; pass --resume to extend it to {updates:,}, "
                "choose another folder, or pass --overwrite to start again"
            )
        # A kill between the two writes must not leave a finished result with the wrong settings. Removing the result first
        # leaves a stopped run instead, which can be continued.
        with explain_os_errors(result_path, "remove"):
            remove_files(result_path)
        write_json(settings_file, signature.as_json())
        reporter.say(
            f"train: training.updates = {before:,} is raised to {updates:,}: the moments stay, "
            f"and the learning rate continues as that of {updates:,} updates"
        )
    if begin_artefact(folder, result_path, signature, overwrite=overwrite):
        return True
    write_text(folder / "settings.yaml", yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
    if is_mirrored(folder):  # resuming needs only the newest checkpoint and the files that grow
        names = list_names(folder)
        newest = max(fnmatch.filter(names, f"checkpoints/{CHECKPOINT_NAMES}"), default=None)
        fetch_files(*(folder / name for name in names if "/" not in name or name == newest))
    return False


def _fewer_updates(settings_file: Path, signature: Signature) -> int | None:
    """Return the number of updates of the stored run, if it is smaller and the only difference from `signature`.

    Returns:
        The stored number of updates. None if there is no stored run, or if it differs in another way.
    """
    requested = signature.as_json()
    updates = requested["settings"].get("training", {}).get("updates")
    if updates is None or not settings_file.exists():
        return None
    stored = read_json(settings_file)
    before = stored.get("settings", {}).get("training", {}).get("updates") if isinstance(stored, dict) else None
    if not isinstance(before, int) or before >= updates:
        return None
    requested["settings"]["training"]["updates"] = before
    return before if stored == requested else None
