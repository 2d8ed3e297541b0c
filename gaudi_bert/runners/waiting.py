"""Waiting until what a stage needs is there: what the init container of each Job does, since Kubernetes does not order Jobs.

An artefact's last file appears whole or not at all, so its presence means that the artefact is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gaudi_bert.artefacts.work_folder import SplitPaths, WorkFolder
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import read_json
from gaudi_bert.common.progress import Reporter, human_seconds
from gaudi_bert.config import STAGES
from gaudi_bert.stages.shards import histogram_parts

__all__ = ["WAITERS", "missing_inputs", "wait_for_inputs"]

POLL_SECONDS = 2.0
SAY_EVERY_SECONDS = 60.0

# Who can wait: the stages, and the step that finishes `write` when all its shards are done.
WAITERS = (*STAGES, "write-finish")


def missing_inputs(folder: WorkFolder, waiter: str) -> list[Path]:
    """What `waiter` needs and is not there yet.

    Raises:
        InputError: there is no such stage.
    """
    if waiter not in WAITERS:
        raise InputError(f"--for {waiter}: no such stage; choose one of {', '.join(WAITERS)}")
    if waiter in ("evaluate", "report"):
        done = (
            folder.train / "training.json" if waiter == "evaluate" or not folder.has_evaluation else folder.evaluation_result
        )
        return [] if done.exists() else [done]
    missing = [path for name in folder.splits for path in _missing_of_split(folder, folder.split(name), waiter)]
    return list(dict.fromkeys(missing))


def _missing_of_split(folder: WorkFolder, paths: SplitPaths, waiter: str) -> list[Path]:
    if waiter == "plan":
        return [] if histogram_parts(paths.histogram) else [paths.histogram]
    if waiter == "write-finish":
        return _missing_groups(paths)
    given = folder.records is not None
    needed = {
        "prepare": [],
        "histogram": [] if given else [folder.examples / "examples.json"],
        "write": [paths.plan],
        "verify": [paths.packed / "metadata.json"],
        "train": [paths.verification],
    }
    return [path for path in needed[waiter] if not path.exists()]


def _missing_groups(paths: SplitPaths) -> list[Path]:
    """The manifests of groups that are still to be written."""
    if not paths.plan.exists():
        return [paths.plan]
    groups = len(read_json(paths.plan)["groups"])
    manifests = [paths.packed / f"group-{number:05d}.json" for number in range(groups)]
    return [path for path in manifests if not path.exists()]


def wait_for_inputs(
    folder: WorkFolder,
    waiter: str,
    timeout_seconds: float,
    reporter: Reporter,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Return when all that `waiter` needs is there: the seconds that it took.

    Raises:
        InputError: there is no such stage.
        FailedError: something is still missing after `timeout_seconds`.
    """
    started = last_said = clock()
    while missing := missing_inputs(folder, waiter):
        waited = clock() - started
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        if waited >= timeout_seconds:
            raise FailedError(
                f"{missing[0]}{others}: not there after {human_seconds(waited)}, so {waiter} cannot start; "
                "see why the stage before it did not finish, then run this again"
            )
        if waited == 0 or clock() - last_said >= SAY_EVERY_SECONDS:
            last_said = clock()
            reporter.say(f"{waiter}: waiting for {missing[0]}{others}")
        sleep(min(POLL_SECONDS, timeout_seconds - waited))
    return clock() - started
