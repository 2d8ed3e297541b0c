"""Runs the stages of a pipeline in containers of this machine, one after the other.

Each stage runs `gaudi-bert run PIPELINE --stages STAGE` in its image, so it decides for itself whether its artefact is there
already. One run at a time works in a work folder: a lock keeps others out, and containers that a killed run left behind are
found by their label. Ctrl-C and SIGTERM are passed on, so that training saves a checkpoint before it ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from gaudi_bert.artefacts.store.location import in_store, shown_place
from gaudi_bert.artefacts.store.scratch import scratch_folder
from gaudi_bert.common.errors import FailedError, StoppedError
from gaudi_bert.common.files import exclusive_lock, explained_os_errors, write_text
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.docker.containers import DockerRun, container_marks, rendezvous_container, stage_containers
from gaudi_bert.runners.docker.engine import Engine
from gaudi_bert.runners.docker.follow import Follower, follow_all, stop_all
from gaudi_bert.runners.docker.store_access import portable_settings, stored_places
from gaudi_bert.runners.rendezvous import READY
from gaudi_bert.runners.stage_table import STAGES

__all__ = ["run_on_docker"]

Summary = dict[str, Any]

_STOPPED = "stopped on request; the same command goes on from what is finished"


class _StopAsked(KeyboardInterrupt):
    """SIGTERM, wherever this process is at that moment."""


def run_on_docker(
    settings: PipelineSettings,
    stages: Sequence[str],
    pipeline: Path,
    work: Path,
    reporter: Reporter,
    *,
    flags: Sequence[str] = (),
) -> dict[str, Summary]:
    """Run `stages`, in the order given, each in its container.

    Args:
        settings: the pipeline, with all that `--set` changed.
        stages: of `gaudi_bert.runners.stage_table.STAGES`.
        pipeline: the pipeline file.
        work: the folder that holds the work folders of all pipelines, or its URL in an object store.
        reporter: where progress goes.
        flags: further options of `gaudi-bert run` for each stage, e.g. `--overwrite`.

    Returns:
        What each stage says of itself, as the local runner does.

    Raises:
        InputError: no Docker, no image, a path that is not there, or as the stage says.
        FailedError: a stage failed, or another run works in the same work folder.
        StoppedError: SIGTERM; the same command goes on.
    """
    engine = Engine()
    stored = any(stored_places(settings, work, stage) for stage in stages)
    with ExitStack() as stack:
        user = stack.enter_context(_alone_in(work / settings.name))
        scratch = stack.enter_context(_scratch_for(user, settings.store.scratch)) if stored else None
        stack.enter_context(_sigterm_raises())
        run = DockerRun(
            settings, work, pipeline, user, secrets.token_hex(4), tuple(flags), scratch, environment=dict(os.environ)
        )
        _clear_leftovers(engine, run)
        for image in dict.fromkeys(run.image(stage) for stage in stages):
            engine.need_image(image, settings.images, reporter)
        write_text(run.settings_file, _as_yaml(portable_settings(settings)))
        try:
            return {stage: _run_stage(engine, run, stage, reporter) for stage in stages}
        except _StopAsked as error:
            raise StoppedError(_STOPPED) from error
        finally:
            run.settings_file.unlink(missing_ok=True)


@contextmanager
def _alone_in(place: Path) -> Iterator[str]:
    """Keep other runs out of a work folder: whose files the containers make there.

    For a folder in an object store, no file keeps others out, but containers that work in it do.
    """
    if in_store(place):
        yield f"{os.getuid()}:{os.getgid()}"
        return
    root = Path(os.path.abspath(place))
    with explained_os_errors(root, "make"):
        root.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(root / "run-in-docker", f"{place} (--on docker)"):
        yield _user_of(root)


@contextmanager
def _scratch_for(user: str, parent: str | None) -> Iterator[Path]:
    """Scratch, with a folder `files` that `user` may write to."""
    with scratch_folder(parent) as scratch:
        files = scratch / "files"
        with explained_os_errors(files, "make"):
            files.mkdir()
            if os.getuid() == 0:
                os.chown(files, *map(int, user.split(":")))
        yield scratch


def _as_yaml(settings: PipelineSettings) -> str:
    return yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True), sort_keys=False, default_flow_style=None)


def _user_of(root: Path) -> str:
    """Whose files the containers make: the caller's; where that is root, those of the work folder's owner."""
    if os.getuid() != 0:
        return f"{os.getuid()}:{os.getgid()}"
    owner = root.stat()
    return f"{owner.st_uid}:{owner.st_gid}"


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM interrupt like Ctrl-C; outside the main thread, where Python allows no handlers, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _StopAsked

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _clear_leftovers(engine: Engine, run: DockerRun) -> None:
    """Remove ended containers of earlier runs; a running one still works in the folder.

    Raises:
        FailedError: one is running.
    """
    for container in engine.containers_in(str(run.root)):
        if container.status in ("running", "paused", "restarting"):
            raise FailedError(
                f"{shown_place(run.root)}: container {container.name} of an earlier run still works in it; "
                f"wait for its end, or remove it: docker rm --force {container.name}"
            )
        engine.remove(container)


def _run_stage(engine: Engine, run: DockerRun, stage: str, reporter: Reporter) -> Summary:
    containers = stage_containers(run, stage)
    several = f" ({len(containers)} containers)" if len(containers) > 1 else ""
    on_host = " (on this machine's network, where the store is)" if run.access(stage).host_network else ""
    reporter.say(f"docker: {stage} in {run.image(stage)}{several}{on_host}")
    memory_key = f"resources.{'training' if STAGES[stage].trains else 'data'}.memory_limit"
    with ExitStack() as stack:
        if len(containers) > 1:
            stack.enter_context(engine.network(run.name("network"), run.labels, way_out=run.access(stage).is_needed))
            _start_rendezvous(engine, run, stack)
        followers = []
        for options, mark in zip(containers, container_marks(containers), strict=True):
            container = engine.create(options)
            stack.callback(engine.remove, container)
            followers.append(Follower(engine, container, reporter, mark, memory_key))
        result = _follow_until_stopped(engine, followers)
    summary: Summary = result.get(stage, {})
    return summary


def _start_rendezvous(engine: Engine, run: DockerRun, stack: ExitStack) -> None:
    container = engine.create(rendezvous_container(run))
    stack.callback(engine.remove, container)
    output = engine.output(container)
    engine.start(container)
    said = ""
    for pieces in output:
        said += "".join((piece or b"").decode("utf-8", "replace") for piece in pieces)
        if READY in said:
            return
    reason = " | ".join(said.splitlines()[-3:]) or "it said nothing"
    raise FailedError(f"container {container.name} ended before the training workers could meet: {reason}")


def _follow_until_stopped(engine: Engine, followers: Sequence[Follower]) -> dict[str, Any]:
    """Start all and wait for their end; when asked to stop, let them stop first.

    Raises:
        StoppedError: all ended in a state from which the same command goes on.
    """
    try:
        for follower in followers:
            follower.start()
        return follow_all(followers)
    except KeyboardInterrupt:
        stop_all(engine, [follower.container for follower in followers])
        raise
