"""Runs the stages of a pipeline in this process, one after the other; or waits until the inputs of one of them exist.

Waiting is what the init container of each Job does, since Kubernetes does not order Jobs. The last file of an artefact
appears complete or not at all, so its presence means that the artefact is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.artefacts.mirrored_folder import exists
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.errors import FailedError, InputError, require
from gaudi_bert.common.files import in_store, shown_location
from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.stage_calls import RunRequest
from gaudi_bert.runners.stage_table import SHARED_STAGES, STAGES, STEPS, check_stages, select_stages

if TYPE_CHECKING:  # its types need numpy
    from gaudi_bert.runners.stage_calls import StageResult

_TASK_STAGES = frozenset({"finetune", "predict"})
# The library that a stage needs beyond the core.
_OF_STAGE = {"prepare": "tokenizers", "report": "matplotlib"}
POLL_SECONDS = 2.0
_SAY_EVERY_SECONDS = 60.0


def run_stages(run: RunRequest, stages: Sequence[str]) -> dict[str, StageResult]:
    """Run `stages` in the pipeline's order; the result of each."""
    _check_sharing(run, stages)
    check_stages(run.settings, stages)
    require(_libraries(run.settings, stages), "this run")
    if _TASK_STAGES.intersection(stages) and in_store(run.folder.root):
        raise InputError(
            f"--work {shown_location(run.folder.root)}: the stages finetune and predict need a work folder on this machine; "
            "give a folder (rows and weights may be URLs)"
        )
    results: dict[str, StageResult] = {}
    for name in select_stages(stages):
        run.how.reporter.say(f"--- {name}")
        for needed in STAGES[name].needs:
            for path in STAGES[needed].missing_products(run.folder):
                raise InputError(f"{shown_location(path)}: does not exist; run the stage `{needed}` first")
        results[name] = STAGES[name].call(run)
    return results


def _libraries(settings: PipelineSettings, stages: Sequence[str]) -> Iterator[str]:
    """All that the stages need beyond the core, so that what is missing is named before the first of them runs."""
    for name in select_stages(stages):
        if name in _OF_STAGE:
            yield _OF_STAGE[name]
        if STAGES[name].trains:
            engine = settings.finetune.engine if name in _TASK_STAGES else settings.training.engine
            if engine == "auto":
                engine = "pytorch" if find_spec("tensorflow") is None else "tensorflow"
            yield "torch" if engine == "pytorch" else engine


def _check_sharing(run: RunRequest, stages: Sequence[str]) -> None:
    if run.how.part is not None and (len(stages) != 1 or stages[0] not in SHARED_STAGES):
        raise InputError(f"--shard: give one stage that can be shared out, --stages {' or '.join(SHARED_STAGES)}")
    finished = [stage.name for stage in STAGES.values() if stage.parts is not None]
    if run.how.finish and (len(stages) != 1 or stages[0] not in finished):
        raise InputError(f"--finish: give one stage that has a step to finish it, --stages {' or '.join(finished)}")
    if run.how.finish and run.how.overwrite:
        raise InputError("--finish and --overwrite exclude each other; do the parts again with --shard K/N --overwrite")


def _missing_inputs(folder: WorkFolder, step: str) -> list[Path]:
    """List what `step` needs and does not have yet: of a stage, or of the step that finishes one (`write-finish`)."""
    if step not in STEPS:
        raise InputError(f"--for {step}: no such stage; choose one of {', '.join(STEPS)}")
    stage = STEPS[step]
    if stage.parts is not None and step != stage.name:
        missing = [path for path in stage.parts(folder) if not exists(path, folder.store)]
    else:
        missing = [path for name in (*stage.needs, *stage.follows) for path in STAGES[name].missing_products(folder)]
    return list(dict.fromkeys(missing))


def wait_for_inputs(
    folder: WorkFolder,
    step: str,
    timeout_seconds: float,
    reporter: Reporter,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Return when all that `step` needs exists: the seconds that it took."""
    started = last_message = clock()
    while missing := _missing_inputs(folder, step):
        waited = clock() - started
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if waited >= timeout_seconds:
            raise FailedError(
                f"{shown_location(missing[0])}{others}: not there after {human_seconds(waited)}, so {step} cannot start; "
                "see why the stage before it did not finish, then run this again"
            )
        if waited == 0 or clock() - last_message >= _SAY_EVERY_SECONDS:
            last_message = clock()
            reporter.say(f"{step}: waiting for {shown_location(missing[0])}{others}")
        sleep(min(POLL_SECONDS, timeout_seconds - waited))
    return clock() - started
