"""Runs the stages of a pipeline in containers of this machine, one after the other.

Each stage runs `gaudi-bert run PIPELINE --stages STAGE` in its image, so it decides for itself whether its artefact is there
already. One run at a time works in a work folder: a lock keeps others out, and containers of a killed run are
recognised by their label. Ctrl-C and SIGTERM are passed on, so that training saves a checkpoint before it ends.
"""

from __future__ import annotations

import codecs
import os
import re
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

from gaudi_bert.artefacts.store.mirrored_folder import scratch_folder
from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError
from gaudi_bert.common.files import exclusive_lock, explained_os_errors, in_store, shown_location, write_text
from gaudi_bert.common.launch import handled_signals
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.docker.containers import (
    DockerRun,
    portable_settings,
    rendezvous_container,
    stage_containers,
    store_urls,
)
from gaudi_bert.runners.docker.daemon import Daemon
from gaudi_bert.runners.launch import RENDEZVOUS_READY, failed_rank, rank_pieces
from gaudi_bert.runners.stage_table import STAGES

_STOPPED = "stopped on request; run the same command again to resume"


class _StopRequested(KeyboardInterrupt):
    """SIGTERM, wherever this process is at that moment."""


def run_on_docker(
    settings: PipelineSettings,
    stages: Sequence[str],
    pipeline: Path,
    work: Path,
    reporter: Reporter,
    *,
    flags: Sequence[str] = (),
) -> dict[str, list[str]]:
    """Run `stages`, in the order given, each in its container; the lines of the result that each printed.

    `settings` are the pipeline file's with all that `--set` changed, `work` is the folder that holds the work folders of
    all pipelines, or its URL; `flags` are further options of `gaudi-bert run` for each stage, e.g. `--overwrite`.
    """
    daemon = Daemon()
    uses_store = any(store_urls(settings, work, stage) for stage in stages)
    with ExitStack() as stack:
        user = stack.enter_context(_alone_in(work / settings.name))
        scratch = stack.enter_context(_scratch_for(user, settings.store.scratch)) if uses_store else None
        stack.enter_context(handled_signals((signal.SIGTERM,), _request_stop))
        run = DockerRun(
            settings, work, pipeline, user, secrets.token_hex(4), tuple(flags), scratch, environment=dict(os.environ)
        )
        _clear_leftovers(daemon, run)
        for image in dict.fromkeys(run.image(stage) for stage in stages):
            daemon.need_image(image, settings.images, reporter)
        values = portable_settings(settings).model_dump(mode="json", exclude_unset=True)
        write_text(run.settings_file, yaml.safe_dump(values, sort_keys=False, default_flow_style=None))
        try:
            return {stage: _run_stage(daemon, run, stage, reporter) for stage in stages}
        except _StopRequested as error:
            raise StoppedError(_STOPPED) from error
        finally:
            run.settings_file.unlink(missing_ok=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[str]:
    """Keep other runs out of a work folder: whose files the containers make there.

    For a folder in an object store, no file keeps others out, but containers that work in it do.
    """
    if in_store(folder):
        yield f"{os.getuid()}:{os.getgid()}"
        return
    root = Path(os.path.abspath(folder))
    with explained_os_errors(root, "make"):
        root.mkdir(parents=True, exist_ok=True)
    owner = root.stat()
    with exclusive_lock(root / "run-in-docker", f"{folder} (--on docker)"):
        # Root's containers write as the owner of the work folder.
        yield f"{os.getuid()}:{os.getgid()}" if os.getuid() != 0 else f"{owner.st_uid}:{owner.st_gid}"


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


def _request_stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _StopRequested


def _clear_leftovers(daemon: Daemon, run: DockerRun) -> None:
    """Remove ended containers of earlier runs; refuse to run while one still works in the folder."""
    for container in daemon.containers_in(str(run.root)):
        if container.status in ("running", "paused", "restarting"):
            raise FailedError(
                f"{shown_location(run.root)}: container {container.name} of an earlier run still works in it; "
                f"wait for its end, or remove it: docker rm --force {container.name}"
            )
        daemon.remove(container)


def _run_stage(daemon: Daemon, run: DockerRun, stage: str, reporter: Reporter) -> list[str]:
    containers = stage_containers(run, stage)
    several = f" ({len(containers)} containers)" if len(containers) > 1 else ""
    on_host = " (on this machine's network, where the store is)" if run.access(stage).host_network else ""
    reporter.say(f"docker: {stage} in {run.image(stage)}{several}{on_host}")
    memory_key = f"resources.{'training' if STAGES[stage].trains else 'data'}.memory_limit"
    with ExitStack() as stack:
        if len(containers) > 1:
            stack.enter_context(daemon.network(run.name("network"), run.labels, way_out=bool(run.access(stage).mounts)))
            if run.needs_rendezvous(stage):
                _start_rendezvous(daemon, run, stack)
        followers = []
        for rank, options in enumerate(containers):
            mark = f"[worker {rank}] " if len(containers) > 1 else ""
            container = daemon.create(options)
            stack.callback(daemon.remove, container)
            followers.append(_Follower(daemon, container, reporter, mark, memory_key, stage))
        try:
            for follower in followers:
                follower.start()
            result = _follow_all(followers)
        except KeyboardInterrupt:
            with ThreadPoolExecutor(len(followers)) as pool:
                list(pool.map(lambda follower: daemon.stop(follower.container, _STOP_SECONDS), followers))
            raise
    return result


def _start_rendezvous(daemon: Daemon, run: DockerRun, stack: ExitStack) -> None:
    container = daemon.create(rendezvous_container(run))
    stack.callback(daemon.remove, container)
    output = daemon.output(container)
    daemon.start(container)
    log = ""
    for pieces in output:
        log += "".join((piece or b"").decode("utf-8", "replace") for piece in pieces)
        if RENDEZVOUS_READY in log:
            return
    reason = " | ".join(log.splitlines()[-3:]) or "it wrote nothing"
    raise FailedError(f"container {container.name} ended before the training workers could meet: {reason}")


# --- following the containers of one stage to their end
#
# What a container writes to standard error is progress and is shown at once. Standard output is its result: one JSON object,
# or lines that begin with the stage; anything else there is a library's, and shown too.
# The last line of a stage that fails is the reason, `error: ...`; that line becomes our own error, with the same exit code.

# Long enough for an update and a checkpoint.
_STOP_SECONDS = 120
_POLL_SECONDS = 0.2
_LAST_LINES = 5
# Enough for what mpirun writes after a rank has failed.
_OUTPUT_LINES = 1000
_LOG_END_SECONDS = 10.0
_ERROR = "error: "
_ERRORS: dict[int, type[GaudiBertError]] = {2: InputError, 75: StoppedError}


class _Follower:
    """One container of a stage.

    `mark` is put before each line, `memory_key` is the setting that limits its memory, for an error.
    """

    def __init__(self, daemon: Daemon, container: Any, reporter: Reporter, mark: str, memory_key: str, stage: str) -> None:
        self.container = container
        self.result: list[str] = []
        self._is_result = re.compile(rf"{stage}( \w+)?: |{{\"{stage}\": ").match
        self._daemon, self._reporter, self._mark, self._memory_key = daemon, reporter, mark, memory_key
        self._error_line = ""
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        self._thread = threading.Thread(target=self._read, args=(daemon.output(container),), daemon=True)

    def start(self) -> None:
        """Start the container and read its output."""
        self._thread.start()
        self._daemon.start(self.container)

    @property
    def has_ended(self) -> bool:
        """Whether the output has ended, because the container or the daemon did."""
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of a container that has ended and failed; its exit code decides the kind."""
        state = self._daemon.end_state(self.container)
        self._thread.join(_LOG_END_SECONDS)
        code = int(state["ExitCode"])
        if code == 0:
            return
        if state.get("OOMKilled"):
            raise FailedError(
                f"{self._mark}container {self.container.name} used more memory than it may; raise {self._memory_key}"
            )
        reason = failed_rank("\n".join(self._output))
        if reason is not None:
            raise _ERRORS.get(code, FailedError)(self._mark + reason.replace(_ERROR, "", 1))
        # The last line of a stage that was stopped on request is the reason, without `error:`.
        why = self._error_line or (self._last_lines[-1] if code == StoppedError.exit_code and self._last_lines else "")
        if why:
            raise _ERRORS.get(code, FailedError)(self._mark + why)
        last = " | ".join(self._last_lines) or state.get("Error") or "it wrote nothing"
        raise FailedError(f"{self._mark}container {self.container.name} ended with exit code {code}: {last}")

    def _read(self, pieces: Any) -> None:
        outputs = _Lines(self._take_result), _Lines(self._take_progress)
        # A connection that breaks means that the daemon ended; waiting for the container's end reports that.
        with suppress(OSError, ValueError):
            for pair in pieces:
                for lines, piece in zip(outputs, pair, strict=True):
                    lines.add(piece or b"")
        for lines in outputs:
            lines.end()

    def _take_progress(self, line: str) -> None:
        self._output.append(line)
        for rank, text in rank_pieces(line):
            if text.startswith(_ERROR):
                self._error_line = text.removeprefix(_ERROR)
            elif text or rank is None:
                self._last_lines.append(text)
                self._reporter.say(self._mark + text)

    def _take_result(self, line: str) -> None:
        for rank, text in rank_pieces(line):
            if not self._is_result(text):
                self._take_progress(text)
            elif not rank:
                self.result.append(text)


class _Lines:
    """Puts lines together from pieces of bytes."""

    def __init__(self, take: Any) -> None:
        self._take = take
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""

    def add(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + self._decode(piece)).split("\n")
        for line in lines:
            self._take(line.rstrip("\r"))

    def end(self) -> None:
        if self._rest:
            self._take(self._rest)


def _follow_all(followers: Sequence[_Follower]) -> list[str]:
    """Wait until all have ended, or one has failed: the result of the first."""
    waiting = list(followers)
    while waiting:
        ended = [follower for follower in waiting if follower.has_ended]
        for follower in ended:
            follower.check()
            waiting.remove(follower)
        if waiting and not ended:
            time.sleep(_POLL_SECONDS)
    return followers[0].result
