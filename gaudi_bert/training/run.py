"""A run, whatever is trained: records (`train.py`), a packed table or a task (`tasks/`). `run_job` names its steps.

A job is what distinguishes one kind of run from the others: its data, model, objective, evaluation and result. All else is
here and in the files that the steps name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic

from gaudi_bert.artefacts.completion import Signature, is_finished
from gaudi_bert.artefacts.results import StageOutput
from gaudi_bert.artefacts.store.mirrored_folder import mirrored
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.launch import is_first_process, shares_folders
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import LoopSettings, TrainingSettings
from gaudi_bert.engines.protocol import Model, ModelSpec, Updates, load_engine
from gaudi_bert.training.checkpoint import Progress, resume_run, share_state
from gaudi_bert.training.evaluate import EvaluationSet, Evaluator
from gaudi_bert.training.input.batches import Batch, TrainingOrder
from gaudi_bert.training.loop import TrainingLoop
from gaudi_bert.training.mlperf import MlperfLog
from gaudi_bert.training.objective import GLOBAL, Evaluation, LossDenominators, Objective, TrainingStep
from gaudi_bert.training.run_folder import R, RunContext, nothing_to_do, run_engine, run_folder
from gaudi_bert.training.run_plan import STAGE_OF_SECTION, RunPlan


class Job(ABC, Generic[R]):
    """What one kind of run adds to the steps of `run_job`, which calls the methods in this sequence.

    Attributes:
        result_name: the file that is written last; `result_type` is its content.
        section: the settings of its loop.
        is_bert: whether its model is a BERT, which every engine runs.
        evaluates_first: whether the model is evaluated before the first update too.
        spec: the model; `objective` is what is minimised, both known once the job is planned.
    """

    result_name: ClassVar[str]
    result_type: type[R]
    section: LoopSettings
    is_bert: bool
    evaluates_first: ClassVar[bool] = False
    spec: ModelSpec
    objective: Objective

    def prepare(self, reporter: Reporter) -> None:
        """Read what is still to be read before the processes meet; only the first one's reporter speaks."""

    @abstractmethod
    def plan(self, processes: int) -> RunPlan:
        """Decide on the model and the batches; refuse what does not fit."""

    @abstractmethod
    def describe(self, plan: RunPlan, dry_run: bool) -> list[str]:
        """The run as lines for people; all of its figures before a dry run."""

    @abstractmethod
    def signature(self) -> Signature:
        """What the result depends on."""

    def begin(self, run: RunContext[R], plan: RunPlan) -> MlperfLog | None:
        """Write what is written before the model is built; the log of the run, where it has one."""
        return None

    def denominators(self) -> LossDenominators:
        """What the losses are divided by."""
        return GLOBAL

    @abstractmethod
    def evaluation(self, plan: RunPlan) -> EvaluationSet[Any] | None:
        """What the model is evaluated on, if anything."""

    def built(self, run: RunContext[R], plan: RunPlan, model: Model) -> None:
        """The model is built, and has its first values."""

    @abstractmethod
    def load_start(self, model: Model, reporter: Reporter) -> None:
        """Load the weights that the run begins with; those that are not named keep their first values."""

    @abstractmethod
    def batches(self, plan: RunPlan, order: TrainingOrder) -> Iterator[Batch]:
        """The batches of this process, without end or as many as there are updates."""

    def stored(self) -> dict[str, Any]:
        """What checkpoints hold of the job, besides the settings of model and loop."""
        return {}

    def evaluated(self, run: RunContext[R], model: Model, update: int, evaluation: Evaluation) -> None:
        """An update was evaluated; every process calls it."""

    @abstractmethod
    def finish(self, loop: TrainingLoop) -> R:
        """Write what else is in the folder, and give the result."""


def run_job(
    job: Job[R],
    settings: PipelineSettings,
    out: Path,
    *,
    reporter: Reporter,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> StageOutput[R] | RunPlan:
    """Train in the folder `out`; the same result in every process.

    A run of the same settings that was stopped continues; with `resume`, one of fewer updates does too. With `overwrite`,
    the run in `out` is removed, whatever it is. With `dry_run`, nothing is written, and its plan is printed and returned.
    """
    if resume and overwrite:
        raise InputError("--resume and --overwrite exclude each other; give the one you mean")
    with mirrored(Path(out), settings.store) as folder:
        chosen = run_engine(job.section, folder, is_bert=job.is_bert, overwrite=overwrite)
        prefix = "" if dry_run else f"{STAGE_OF_SECTION[job.section.section_name]}: "
        say, reporter = reporter.say, reporter if is_first_process() else Reporter(quiet=True)
        reporter.say(f"{prefix}{chosen.line()}")  # before what takes seconds to load
        job.prepare(reporter)
        signature, result_path = job.signature(), folder / job.result_name
        # Known before the processes meet: a pod that is lost when others are done is started once more, and meets nobody.
        if not (overwrite or dry_run) and shares_folders() and is_finished(folder, result_path, signature):
            say(nothing_to_do(folder, signature))
            return StageOutput(job.result_type.read(result_path), skipped=True)
        engine = load_engine(chosen.name)
        communicator = engine.connect(job.section, signature.facts())
        processes = communicator.size
        if dry_run and processes == 1:  # without a launcher, as many as the settings request
            processes = settings.resources.workers * settings.resources.processes_per_worker
        plan = job.plan(processes)
        for line in job.describe(plan, dry_run):
            reporter.say(f"{prefix}{line}")
        if dry_run:
            return plan
        with run_folder(
            result_path,
            job.result_type,
            signature,
            settings,
            job.section,
            engine,
            communicator,
            reporter,
            resume=resume,
            overwrite=overwrite,
        ) as run:
            if run.stored is not None:
                return StageOutput(run.stored, skipped=True)
            return StageOutput(run.finish(_train(job, plan, run)))


def _train(job: Job[R], plan: RunPlan, run: RunContext[R]) -> R:
    """Build, resume, train to the end."""
    communicator = run.communicator
    if run.begun_by != plan.processes and plan.rows:
        plan = replace(job.plan(run.begun_by), processes=plan.processes, begun_by=run.begun_by)
    settings = plan.settings
    events = job.begin(run, plan)
    model = run.engine.build(job.spec, run.device, seed=settings.seed, compiled=run.compiled)
    updates = run.engine.updates(model, settings, communicator, plan.accumulation_steps)
    step = TrainingStep(updates, communicator, settings, job.objective, job.denominators())
    held_out = job.evaluation(plan)
    job.built(run, plan, model)
    progress = _restored(job, run, model, updates)
    rank, size = communicator.rank, communicator.size
    order = TrainingOrder(settings.seed, settings.shuffle_packs, rank, size, progress.packs, progress.update)
    loop = TrainingLoop(
        run,
        plan,
        step,
        model,
        job.batches(plan, order),
        progress,
        _stored_settings(job, run),
        evaluator=None if held_out is None else Evaluator(model, held_out, communicator),
        events=events,
        evaluated=partial(job.evaluated, run, model),
        evaluates_first=job.evaluates_first,
    )
    loop.run()
    return job.finish(loop)


def _restored(job: Job[R], run: RunContext[R], model: Model, updates: Updates) -> Progress:
    """Resume from the newest checkpoint, or else load the weights that the run begins with; the same in every process."""
    progress = Progress()
    if run.communicator.is_first:
        progress = resume_run(run.checkpoints, model, updates, run.signature.as_json(), run.reporter.say)
        if progress.update == 0:
            job.load_start(model, run.reporter)
    return share_state(progress, model, updates, run.communicator)


# Settings that a checkpoint does not hold: any engine on any machine resumes from it.
_OF_THE_MACHINE = ("engine", "device", "compile")


def _stored_settings(job: Job[R], run: RunContext[R]) -> dict[str, Any]:
    """What every checkpoint of a run holds besides its state; paths are those of the user, and left out."""
    section = job.section
    fields = TrainingSettings.model_fields if isinstance(section, TrainingSettings) else LoopSettings.model_fields
    names = fields.keys() - {"init_checkpoint", *_OF_THE_MACHINE}
    return {
        "model": job.spec.config.to_json(),
        "training": section.model_dump(mode="json", include=names),
        **job.stored(),
        "compiled_kernels": run.compiled,
        "run": run.signature.as_json(),
    }
