"""The life of a run, the same for `train` and `finetune`: a folder that is begun, continued or found finished.

Every process opens its device and joins the others. The first one locks the folder, decides whether there is anything to
do, and writes: `settings.yaml` (the pipeline's settings, to be read and used again), `settings.json` (what the result
depends on), `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `tensorflow.log` (TensorFlow's and XLA's own lines) and, last,
the result. To an object store, the files that grow go up before each checkpoint, everything else as it is written.

A run that was stopped continues with the same command. With `resume`, so does a run of fewer updates and otherwise the same
settings: its weights, moments and position in the data are kept, and the learning rate of every later update is that of the
longer run.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np
import yaml

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, remove_artefact, settings_path
from gaudi_bert.artefacts.results import Made
from gaudi_bert.artefacts.store.mirrored_folder import fetch, is_mirrored, names_in, publish, remove, shown
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock, explained_os_errors, read_json, write_json, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.common.tensorflow_environment import native_lines_to
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.training.checkpoint import Progress, newest_settings, resume_run, share_state
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.loop import Outcome, TrainingLoop, TrainingRun
from gaudi_bert.training.tensorflow.device import Device, open_device

CHECKPOINTS = "checkpoints/update-*.safetensors"
COMPILED_KEY = "compiled_kernels"

R = TypeVar("R", bound=Artefact)


@dataclass(frozen=True)
class RunFolder(Generic[R]):
    """Where a run lies and what it depends on.

    `result` is the file that is written last, `content` its type, `section` the part of the settings that is this stage's.
    """

    stage: Literal["train", "finetune"]
    path: Path
    result: Path
    content: type[R]
    signature: Signature
    settings: PipelineSettings
    section: LoopSettings


@dataclass(frozen=True)
class Session:
    """What the work of a run is given once the folder is its own."""

    communicator: Communicator
    device: Device
    compiled: bool


def carry_out(
    run: RunFolder[R],
    communicator: Communicator,
    reporter: Reporter,
    work: Callable[[Session], R],
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Made[R]:
    """Do the work of a run unless it is done already; the same result in every process."""
    section, first = run.section, communicator.is_first
    threads = _threads_of(section.threads, communicator.local_size)
    device = open_device(section.device, section.precision, threads, run.settings.gaudi, section.section_name)
    with communicator.watched(section) as watched:

        def stored_result() -> Made[R]:
            done = "trained" if run.stage == "train" else "fine-tuned"
            reporter.say(f"{shown(run.path)}: already {done} with these settings, nothing to do")
            return Made(watched.from_first(lambda: run.content.read(run.result)), skipped=True)

        # At first without a lock, so that a finished folder may be read-only.
        if watched.from_first(lambda: not overwrite and is_finished(run.path, run.result, run.signature)):
            return stored_result()
        with exclusive_lock(run.path, str(run.path)) if first else nullcontext():
            if watched.from_first(lambda: _begin(run, reporter, resume, overwrite)):
                return stored_result()
            others = f", {watched.size} processes" if watched.size > 1 else ""
            reporter.say(f"{run.stage}: on {device.description}{others}")
            for note in device.notes:
                reporter.say(note)
            with _native_lines_in(run.path, watched.rank):
                compiled = _compiles_kernels(run.path / "checkpoints", watched, device, reporter)
                own_result = work(Session(watched, device, compiled))
            result = watched.from_first(lambda: own_result)
            if first:
                publish(run.path)
                result.write(run.result)
    return Made(result)


def processes_of(settings: PipelineSettings, communicator: Communicator, dry_run: bool) -> int:
    """How many processes train together; in a dry run without a launcher, as many as the settings ask for."""
    if dry_run and communicator.size == 1:
        return settings.resources.workers * settings.resources.processes_per_worker
    return communicator.size


def train_to_the_end(run: TrainingRun, start: Callable[[], None]) -> Outcome:
    """Resume, or else `start` from the first weights, and train."""
    progress = Progress()
    if run.communicator.is_first:
        progress = resume_run(run.checkpoints, run.model, run.optimizer, run.reporter.say)
        if progress.update == 0:
            start()
        else:
            run.reporter.say(f"{run.plan.keys.stage}: resuming after update {progress.update}")
    progress = share_state(progress, run.model, run.optimizer, run.communicator)
    return TrainingLoop(run, progress).run()


def _begin(run: RunFolder[R], reporter: Reporter, resume: bool, overwrite: bool) -> bool:
    """Whether the run is finished already; otherwise its folder is made ready to begin or to continue."""
    folder, settings_file = run.path, settings_path(run.path)
    fetch(settings_file)
    if overwrite and settings_file.exists():
        remove_artefact(folder)
    before = _fewer_updates(settings_file, run.signature)
    if before is not None:
        updates = run.signature.settings["training"]["updates"]
        if not resume:
            raise InputError(
                f"{folder}: is this run with training.updates = {before:,}; pass --resume to go on to {updates:,}, "
                "choose another folder, or pass --overwrite to start anew"
            )
        # First the run stops being finished: a kill between the two leaves one that was stopped.
        with explained_os_errors(run.result, "remove"):
            remove(run.result)
        write_json(settings_file, run.signature.as_json())
        reporter.say(
            f"train: training.updates = {before:,} is raised to {updates:,}: the moments are kept, "
            f"and the learning rate goes on as that of {updates:,} updates"
        )
    if begin_artefact(folder, run.result, run.signature, overwrite=overwrite):
        return True
    write_text(folder / "settings.yaml", yaml.safe_dump(run.settings.model_dump(mode="json"), sort_keys=False))
    _fetch_what_goes_on(folder)
    return False


def _fetch_what_goes_on(folder: Path) -> None:
    """Bring down what a stopped run goes on from: its newest checkpoint, and the files that grow."""
    if is_mirrored(folder):
        names = names_in(folder)
        newest = max(fnmatch.filter(names, CHECKPOINTS), default=None)
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


# --- What every process decides for itself


def _threads_of(requested: int | None, processes_on_host: int) -> int | None:
    """CPU threads of this process: processes that share a host share its cores."""
    if requested is not None or processes_on_host == 1:
        return requested
    return max(1, (os.cpu_count() or 1) // processes_on_host)


def _native_lines_in(folder: Path, rank: int) -> AbstractContextManager[None]:
    """TensorFlow's and XLA's own lines go to a log file of each process, where it sees the folder of the run."""
    if not folder.is_dir():
        return nullcontext()
    return native_lines_to(folder / ("tensorflow.log" if rank == 0 else f"tensorflow-{rank}.log"))


def _compiles_kernels(checkpoints: Path, communicator: Communicator, device: Device, reporter: Reporter) -> bool:
    """Whether kernels are compiled: as when the run began, because compiled dropout drops other numbers."""
    stored = newest_settings(checkpoints) if communicator.is_first else None
    choice = np.array([0.0, 0.0] if stored is None else [1.0, float(stored.get(COMPILED_KEY, False))])
    is_resumed, was_compiled = (value > 0 for value in communicator.sum_array(choice))
    if not is_resumed:
        return device.compiles_kernels
    if was_compiled and device.kind == "hpu":
        reporter.say("note: the run began with kernels compiled for a CPU; from here on dropout draws other places")
        return False
    return bool(was_compiled)
