"""A run, whatever is trained (`jobs/`). `run_job` names its steps.

A job is what distinguishes one kind of run from the others: its data, model, objective, evaluation and result. All else is
here and in the files that the steps name.
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
    check_place,
    is_finished,
    remove_artefact,
    settings_path,
)
from gaudi_bert.artefacts.mirrored_folder import fetch, is_mirrored, mirrored, names_in, remove, shown_path
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock, explain_os_errors, read_json, write_json, write_text
from gaudi_bert.common.launch import find_launch, is_first_process, shares_folders
from gaudi_bert.common.progress import Reporter, redirect_native_output
from gaudi_bert.common.threads import usable_cores
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
    """A job that is ready: what follows from its files, its settings and the number of processes.

    Attributes:
        batches: those of a process, without end or as many as there are updates.
        lines: model, data and batches, for people; `details`: further ones, for a dry run.
        signature: what the result depends on.
        stored: what checkpoints hold besides the settings of model and loop.
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
    """One kind of run, as the steps of `run_job`, which calls the methods in this sequence.

    Attributes:
        result_name: the file that is written last; `result_type` is its content.
        section: the settings of its loop.
        is_bert: whether its model is a BERT, which every engine runs.
        evaluates_first: whether the model is evaluated before the first update too.
    """

    result_name: ClassVar[str]
    result_type: type[R]
    section: LoopSettings
    is_bert: bool
    evaluates_first: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, processes: int, reporter: Reporter) -> Prepared:
        """Read what is to be read, decide on model and batches; refuse what does not fit.

        It may be called again for another number of processes, and reads its files once.
        """

    def begin(self, run: RunContext[R], plan: RunPlan, model: Model) -> MlperfLog | None:
        """Do what comes before the first update of a model that was built; the log of the run, where it has one."""
        return None

    @abstractmethod
    def load_start(self, model: Model, reporter: Reporter) -> None:
        """Load the weights that the run begins with; those that are not named keep their first values."""

    def evaluated(self, run: RunContext[R], model: Model, update: int, evaluation: Evaluation) -> None:
        """Take the figures of an update that was evaluated; every process calls it."""

    @abstractmethod
    def finish(self, loop: TrainingLoop) -> R:
        """Write what else is in the folder, and give the result."""


class RunOptions(TypedDict, total=False):
    """Options of a run that begins or continues.

    One of the same settings that was stopped continues; with `resume`, one of fewer updates does too. With `overwrite`, the
    run that is there is removed, whatever it is. With `dry_run`, nothing is written, and its plan is printed and returned.
    """

    reporter: Required[Reporter]
    resume: bool
    overwrite: bool
    dry_run: bool


def run_job(job: Job[R], settings: PipelineSettings, out: Path, **options: Unpack[RunOptions]) -> StageOutput[R] | RunPlan:
    """Train in the folder `out`; the same result in every process."""
    reporter, dry_run = options["reporter"], options.get("dry_run", False)
    resume, overwrite = options.get("resume", False), options.get("overwrite", False)
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other; give the one you mean")
    with mirrored(Path(out), settings.store) as folder:
        chosen = _engine_of(job, folder, overwrite)
        say, reporter = reporter.say, reporter if is_first_process() else Reporter(quiet=True)
        launch = find_launch()
        processes = launch.size if launch is not None else 1
        if dry_run and processes == 1:  # without a launcher, as many as the settings request
            processes = settings.resources.workers * settings.resources.processes_per_worker
        prefix = "" if dry_run else f"{'train' if job.section.section_name == 'training' else 'finetune'}: "
        reporter.say(f"{prefix}{chosen.line()}")  # before what takes seconds to load
        prepared = job.prepare(processes, reporter)
        plan, signature, result_path = prepared.plan, prepared.signature, folder / job.result_name
        if plan.settings.target_masked_lm_accuracy is not None and prepared.evaluation is None:
            raise InputError("training.target_masked_lm_accuracy: needs evaluation data; pass --evaluation-data")
        # Known before the processes meet: a pod that is lost when others are done is started once more, and meets nobody.
        if not (overwrite or dry_run) and shares_folders() and is_finished(folder, result_path, signature):
            say(_nothing_to_do(folder, signature))
            return StageOutput(job.result_type.read(result_path), skipped=True)
        for line in (*prepared.lines, *((*plan.details(), *prepared.details()) if dry_run else ())):
            reporter.say(f"{prefix}{line}")
        if dry_run:
            return plan
        engine = load_engine(chosen.name)
        communicator = engine.connect(job.section, signature.facts())
        opened = _run_folder(
            job, folder, signature, settings, engine, communicator, reporter, resume=resume, overwrite=overwrite
        )
        with opened as run:
            if run.stored is not None:
                return StageOutput(run.stored, skipped=True)
            return StageOutput(run.finish(_train(job, prepared, run)))


def _train(job: Job[R], prepared: Prepared, run: RunContext[R]) -> R:
    """Build, resume, train to the end."""
    communicator, plan = run.communicator, prepared.plan
    if run.begun_by != plan.processes and plan.rows:
        begun = job.prepare(run.begun_by, Reporter(quiet=True)).plan
        plan = replace(begun, processes=plan.processes, begun_by=run.begun_by)
    settings = plan.settings
    model = run.engine.build(prepared.spec, run.device, seed=settings.seed, compiled=run.compiled)
    updates = run.engine.updates(model, settings, communicator, plan.accumulation_steps)
    step = TrainingStep(updates, communicator, settings, prepared.objective, prepared.denominators)
    mlperf_log = job.begin(run, plan, model)
    progress = Progress()
    if communicator.is_first:  # from the newest checkpoint, or else with the weights that the run begins with
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


# Settings that a checkpoint does not hold: any engine on any machine resumes from it.
_OF_THE_MACHINE = ("engine", "device", "compile")


def _stored_settings(section: LoopSettings, prepared: Prepared, run: RunContext[R]) -> dict[str, Any]:
    """Return what every checkpoint of a run holds besides its state; paths are those of the user, and omitted."""
    fields = TrainingSettings.model_fields if isinstance(section, TrainingSettings) else LoopSettings.model_fields
    names = fields.keys() - {"init_checkpoint", *_OF_THE_MACHINE}
    return {
        "model": prepared.spec.config.to_json(),
        "training": section.model_dump(mode="json", include=names),
        **prepared.stored,
        "compiled_kernels": run.compiled,
        "run": run.signature.as_json(),
    }


# --- The folder of a run: it is new, resumed or finished already
#
# Every process opens its device and joins the others. The first one locks the folder, decides whether there is anything to
# do, and writes: `settings.yaml` (the pipeline's settings, to be read and used again), `settings.json` (what the result
# depends on), `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `engine.log` (what the framework itself prints) and, last,
# the result. To an object store, the files that grow go up before each checkpoint, everything else as it is written.


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
    """Open the folder of a run, to begin or continue it; the communicator of the context is watched."""
    section, result_path = job.section, folder / job.result_name
    threads = section.threads
    if threads is None and communicator.local_size > 1:  # processes that share a host share its cores
        threads = max(1, usable_cores() // communicator.local_size)
    device = engine.open_device(section, threads)
    with communicator.watched(section) as watched, ExitStack() as stack:
        # At first without a lock, so that a finished folder may be read-only.
        is_done = watched.from_first(lambda: not overwrite and is_finished(folder, result_path, signature))
        if not is_done:
            watched.from_first(lambda: check_place(folder, result_path, signature.stage, overwrite))
            if watched.is_first:
                stack.enter_context(exclusive_lock(folder, str(folder)))
            named = section.model_copy(update={"engine": engine.NAME})
            stored = settings.model_copy(update={section.section_name: named})
            is_done = watched.from_first(lambda: _begin(result_path, signature, stored, reporter, resume, overwrite))
        context = RunContext[R](folder, result_path, engine, watched, reporter, device, signature)
        if is_done:
            reporter.say(_nothing_to_do(folder, signature))
            yield replace(context, stored=watched.from_first(lambda: job.result_type.read(result_path)))
            return
        others = f", {watched.size} processes" if watched.size > 1 else ""
        reporter.say(f"{signature.stage}: on {device.description}{others}")
        for note in device.notes:
            reporter.say(note)
        if folder.is_dir():  # not every process may see it
            log = "engine.log" if watched.is_first else f"engine-{watched.rank}.log"
            stack.enter_context(redirect_native_output(folder / log))
        # It continues as it began: compiled dropout draws other masks, and other processes would share other packs.
        begun = watched.from_first(lambda: beginning_of(context.checkpoints))
        begun_by, compiled = begun or (watched.size, device.compiles)
        if compiled and not device.compiles:
            reporter.say("note: the run began with a compiled step, and here it is not; dropout masks differ from now on")
        yield replace(context, compiled=compiled and device.compiles, begun_by=begun_by)


def _nothing_to_do(folder: Path, signature: Signature) -> str:
    """Return the line of a run that is finished already."""
    done = "trained" if signature.stage == "train" else "fine-tuned"
    return f"{shown_path(folder)}: already {done} with these settings, nothing to do"


# --- The engine of a run: settings.yaml in its folder names the one that it began with


def _engine_of(job: Job[R], folder: Path, overwrite: bool) -> ChosenEngine:
    """The engine for a run in `folder`; one that is resumed keeps its own unless the settings name another."""
    settings, file = job.section, folder / "settings.yaml"
    fetch(file)
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
    """Whether the run is finished already; otherwise its folder is prepared to begin or to continue."""
    folder, settings_file = result_path.parent, settings_path(result_path.parent)
    fetch(settings_file)
    if overwrite:
        check_place(folder, result_path, signature.stage, overwrite)
        remove_artefact(folder, result_path, signature.stage)
    before = _fewer_updates(settings_file, signature)
    if before is not None:
        updates = signature.settings["training"]["updates"]
        if not resume:
            raise InputError(
                f"{folder}: this run has training.updates = {before:,}; pass --resume to extend it to {updates:,}, "
                "choose another folder, or pass --overwrite to start again"
            )
        # First the run stops being finished: a kill between the two leaves one that was stopped.
        with explain_os_errors(result_path, "remove"):
            remove(result_path)
        write_json(settings_file, signature.as_json())
        reporter.say(
            f"train: training.updates = {before:,} is raised to {updates:,}: the moments stay, "
            f"and the learning rate continues as that of {updates:,} updates"
        )
    if begin_artefact(folder, result_path, signature, overwrite=overwrite):
        return True
    write_text(folder / "settings.yaml", yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
    if is_mirrored(folder):  # what a stopped run resumes from: its newest checkpoint, and the files that grow
        names = names_in(folder)
        newest = max(fnmatch.filter(names, f"checkpoints/{CHECKPOINT_NAMES}"), default=None)
        fetch(*(folder / name for name in names if "/" not in name or name == newest))
    return False


def _fewer_updates(settings_file: Path, signature: Signature) -> int | None:
    """The updates of the stored run, where it differs from `signature` by having fewer of them and in nothing else."""
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
