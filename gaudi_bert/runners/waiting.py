"""Waiting until what a stage needs is there: what the init container of each Job does, since Kubernetes does not order Jobs.

An artefact's last file appears whole or not at all, so its presence means that the artefact is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gaudi_bert.artefacts.store.location import shown_place
from gaudi_bert.artefacts.store.workplace import exists
from gaudi_bert.artefacts.work_folder import WorkFolder
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.config import StoreSettings
from gaudi_bert.runners.stage_table import STAGES, STEPS

__all__ = ["missing_inputs", "wait_for_inputs"]

POLL_SECONDS = 2.0
SAY_EVERY_SECONDS = 60.0


def missing_inputs(folder: WorkFolder, step: str, store: StoreSettings | None = None) -> list[Path]:
    """What `step` needs and is not there yet.

    Args:
        folder: the pipeline's work folder.
        step: a stage, or the step that finishes one when all its parts are done (`write-finish`).
        store: how the object store is reached, where the folder is in one.

    Raises:
        InputError: there is no such step.
    """
    if step not in STEPS:
        raise InputError(f"--for {step}: no such stage; choose one of {', '.join(STEPS)}")
    stage = STEPS[step]
    if stage.parts is not None and step != stage.name:
        missing = [path for path in stage.parts(folder, store) if not exists(path, store)]
    else:
        missing = [path for name in (*stage.needs, *stage.follows) for path in STAGES[name].missing_products(folder, store)]
    return list(dict.fromkeys(missing))


def wait_for_inputs(
    folder: WorkFolder,
    step: str,
    timeout_seconds: float,
    reporter: Reporter,
    *,
    store: StoreSettings | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Return when all that `step` needs is there: the seconds that it took.

    Raises:
        InputError: there is no such step.
        FailedError: something is still missing after `timeout_seconds`.
    """
    started = last_said = clock()
    while missing := missing_inputs(folder, step, store):
        waited = clock() - started
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if waited >= timeout_seconds:
            raise FailedError(
                f"{shown_place(missing[0])}{others}: not there after {human_seconds(waited)}, so {step} cannot start; "
                "see why the stage before it did not finish, then run this again"
            )
        if waited == 0 or clock() - last_said >= SAY_EVERY_SECONDS:
            last_said = clock()
            reporter.say(f"{step}: waiting for {shown_place(missing[0])}{others}")
        sleep(min(POLL_SECONDS, timeout_seconds - waited))
    return clock() - started
