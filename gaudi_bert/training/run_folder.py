"""The folder of a run, the same for every job (`run.py`): it is new, resumed or finished already.

Every process opens its device and joins the others. The first one locks the folder, decides whether there is anything to
do, and writes: `settings.yaml` (the pipeline's settings, to be read and used again), `settings.json` (what the result
depends on), `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `engine.log` (what the framework itself prints) and, last,
the result. To an object store, the files that grow go up before each checkpoint, everything else as it is written.

A run that was stopped continues with the same command. With `resume`, so does a run of fewer updates and otherwise the same
settings: its weights, moments and position in the data stay, and the learning rate of every later update is that of the
longer run.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, remove_artefact, settings_path
from gaudi_bert.artefacts.store.mirrored_folder import fetch, is_mirrored, names_in, publish, remove, shown_path
from gaudi_bert.common.cores import usable_cores
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock, explained_os_errors, read_json, write_json, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.common.tensorflow_environment import native_lines_to
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.config.sections import LoopSettings, TrainingSettings
from gaudi_bert.engines.choose import ChosenEngine, choose_engine
from gaudi_bert.engines.protocol import Communicator, Device, Engine, Model, ModelSpec
from gaudi_bert.training.checkpoint import CHECKPOINT_NAMES, Progress, beginning_of, resume_run, share_state
from gaudi_bert.training.objective import GLOBAL, LossDenominators, Objective, TrainingStep
from gaudi_bert.training.run_plan import RunPlan

# Settings that a checkpoint does not hold: any engine on any machine resumes from it.
_OF_THE_MACHINE = ("engine", "device", "compile")

R = TypeVar("R", bound=Artefact)


@dataclass(frozen=True)
class RunContext(Generic[R]):
    """A run whose folder is open: `stored` is its result where it is finished already, else there is work to do.

    `signature` is what the result depends on; `compiled`: whether kernels are compiled, as when the run began; `begun_by`:
    how many processes began it.
    """

    folder: Path
    result_path: Path
    engine: Engine
    communicator: Communicator
    reporter: Reporter
    device: Device
    signature: Signature
    compiled: bool = False
    begun_by: int = 1
    stored: R | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def finish(self, own_result: R) -> R:
        """Write the first process's result, which every process gets."""
        result = self.communicator.from_first(lambda: own_result)
        if self.communicator.is_first:
            publish(self.folder)
            result.write(self.result_path)
        return result


@contextmanager
def run_folder(
    result_path: Path,
    content: type[R],
    signature: Signature,
    settings: PipelineSettings,
    section: LoopSettings,
    engine: Engine,
    communicator: Communicator,
    reporter: Reporter,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Iterator[RunContext[R]]:
    """Open the folder of a run, to begin or continue it; the communicator of the context is watched.

    `result_path` is the file that is written last, `content` its type; `section` is the part of `settings` for this stage.
    """
    folder = result_path.parent
    threads = _threads_of(section.threads, communicator.local_size)
    device = engine.open_device(section, settings.gaudi, threads)
    with communicator.watched(section) as watched, ExitStack() as stack:
        # At first without a lock, so that a finished folder may be read-only.
        is_done = watched.from_first(lambda: not overwrite and is_finished(folder, result_path, signature))
        if not is_done:
            if watched.is_first:
                stack.enter_context(exclusive_lock(folder, str(folder)))
            named = section.model_copy(update={"engine": engine.NAME})
            stored = settings.model_copy(update={section.section_name: named})
            is_done = watched.from_first(lambda: _begin(result_path, signature, stored, reporter, resume, overwrite))
        context = RunContext[R](folder, result_path, engine, watched, reporter, device, signature)
        if is_done:
            reporter.say(nothing_to_do(folder, signature))
            yield replace(context, stored=watched.from_first(lambda: content.read(result_path)))
            return
        others = f", {watched.size} processes" if watched.size > 1 else ""
        reporter.say(f"{signature.stage}: on {device.description}{others}")
        for note in device.notes:
            reporter.say(note)
        if folder.is_dir():  # not every process may see it
            log = "engine.log" if watched.is_first else f"engine-{watched.rank}.log"
            stack.enter_context(native_lines_to(folder / log))
        yield _as_begun(context)


def nothing_to_do(folder: Path, signature: Signature) -> str:
    """What a run prints that is finished already."""
    done = "trained" if signature.stage == "train" else "fine-tuned"
    return f"{shown_path(folder)}: already {done} with these settings, nothing to do"


# --- The engine of a run: settings.yaml in its folder names the one that it began with


def run_engine(settings: LoopSettings, folder: Path, *, is_bert: bool, overwrite: bool = False) -> ChosenEngine:
    """The engine for a run in `folder`; one that is resumed keeps its own unless the settings name another."""
    file = folder / "settings.yaml"
    fetch(file)
    stored = None
    if file.is_file() and not overwrite:
        stored = getattr(load_pipeline(file), settings.section_name).engine
    key = f"{settings.section_name}.engine"
    return choose_engine(settings.engine, is_bert=is_bert, key=key, stored=None if stored == "auto" else stored)


def processes_of(settings: PipelineSettings, communicator: Communicator, dry_run: bool) -> int:
    """How many processes train together; in a dry run without a launcher, as many as the settings request."""
    if dry_run and communicator.size == 1:
        return settings.resources.workers * settings.resources.processes_per_worker
    return communicator.size


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
    if overwrite and settings_file.exists():
        remove_artefact(folder)
    before = _fewer_updates(settings_file, signature)
    if before is not None:
        updates = signature.settings["training"]["updates"]
        if not resume:
            raise InputError(
                f"{folder}: this run has training.updates = {before:,}; pass --resume to extend it to {updates:,}, "
                "choose another folder, or pass --overwrite to start again"
            )
        # First the run stops being finished: a kill between the two leaves one that was stopped.
        with explained_os_errors(result_path, "remove"):
            remove(result_path)
        write_json(settings_file, signature.as_json())
        reporter.say(
            f"train: training.updates = {before:,} is raised to {updates:,}: the moments stay, "
            f"and the learning rate continues as that of {updates:,} updates"
        )
    if begin_artefact(folder, result_path, signature, overwrite=overwrite):
        return True
    write_text(folder / "settings.yaml", yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))
    _fetch_resumed(folder)
    return False


def _fetch_resumed(folder: Path) -> None:
    """Fetch what a stopped run resumes from: its newest checkpoint, and the files that grow."""
    if is_mirrored(folder):
        names = names_in(folder)
        newest = max(fnmatch.filter(names, f"checkpoints/{CHECKPOINT_NAMES}"), default=None)
        fetch(*(folder / name for name in names if "/" not in name or name == newest))


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


# --- What follows once the folder is open, before the loop


def build_step(
    context: RunContext[R], plan: RunPlan, model: Model, objective: Objective, denominators: LossDenominators = GLOBAL
) -> TrainingStep:
    """The step that trains a model of a plan."""
    settings, communicator = plan.settings, context.communicator
    updates = context.engine.updates(model, settings, communicator, plan.accumulation_steps)
    return TrainingStep(updates, communicator, settings, objective, denominators)


def restore(context: RunContext[R], step: TrainingStep, model: Model, load_first: Callable[[], None]) -> Progress:
    """Resume from the newest checkpoint, or else `load_first` weights; the same state in every process."""
    progress = Progress()
    if context.communicator.is_first:
        signature, say = context.signature.as_json(), context.reporter.say
        progress = resume_run(context.checkpoints, model, step.updates, signature, say)
        if progress.update == 0:
            load_first()
    return share_state(progress, model, step.updates, context.communicator)


def stored_settings(
    context: RunContext[R], section: LoopSettings, spec: ModelSpec, of_job: Mapping[str, Any]
) -> dict[str, Any]:
    """What every checkpoint of a run holds besides its state; paths are those of the user, and left out."""
    fields = TrainingSettings.model_fields if isinstance(section, TrainingSettings) else LoopSettings.model_fields
    names = fields.keys() - {"init_checkpoint", *_OF_THE_MACHINE}
    return {
        "model": spec.config.to_json(),
        "training": section.model_dump(mode="json", include=names),
        **of_job,
        "compiled_kernels": context.compiled,
        "run": context.signature.as_json(),
    }


# --- What every process decides alone


def _threads_of(requested: int | None, processes_on_host: int) -> int | None:
    """CPU threads of this process: processes that share a host share its cores."""
    if requested is not None or processes_on_host == 1:
        return requested
    return max(1, usable_cores() // processes_on_host)


def _as_begun(context: RunContext[R]) -> RunContext[R]:
    """A run that continues as it began: compiled dropout draws other masks, and other processes would share other packs."""
    communicator, device = context.communicator, context.device
    begun = communicator.from_first(lambda: beginning_of(context.checkpoints))
    if begun is None:
        return replace(context, compiled=device.compiles, begun_by=communicator.size)
    if begun.compiled and not device.compiles:
        note = "note: the run began with a compiled step, and here it is not; dropout masks differ from now on"
        context.reporter.say(note)
    return replace(context, compiled=begun.compiled and device.compiles, begun_by=begun.processes)
