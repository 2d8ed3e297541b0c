"""Run the stages of a pipeline in Docker containers on this machine, for `gaudi-bert run --on docker`.

Each stage runs as `gaudi-bert run PIPELINE --stages STAGE` in a new container of its own image. The container has only the
rights that the stage needs: it runs as the caller's user without capabilities. It mounts the work folder, and read-only the
files and folders that the pipeline file names, at the same paths as on the host. A stage that trains on Gaudi cards runs as
root with the vendor's container runtime instead. A stage that uses an object store also gets the caller's credentials for
that store, and the host network.

The Docker daemon must already run. Images are pulled if the pipeline file names a registry, but they are never built here.
"""

from __future__ import annotations

import codecs
import glob
import itertools
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.common.files import explain_os_errors, format_location, is_in_store, store_scheme
from gaudi_bert.common.launch import handle_signals
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import DockerSettings, ImageSettings
from gaudi_bert.runners.stage_table import STAGES, missing_paths, named_paths, quantity_value, stage_image
from gaudi_bert.runners.training_processes import card_variables

_ANSWER_SECONDS = 60
# A training process that is stopped first finishes its update and saves a checkpoint, so wait this long before it is killed.
_STOP_SECONDS = 120
# The label's value is the work folder. It identifies the containers that a killed run left behind.
_WORK_LABEL = "gaudi-bert.work"


def run_on_docker(
    settings: PipelineSettings,
    stages: Sequence[str],
    pipeline: Path,
    work: Path,
    reporter: Reporter,
    *,
    flags: Sequence[str] = (),
) -> dict[str, list[str]]:
    """Run stages in the given order, each in its own container, and return the lines that each stage printed.

    A signal SIGTERM or SIGINT is passed on to the running container, which then saves and stops.

    Args:
        settings: The settings of the pipeline.
        stages: The names of the stages.
        pipeline: The pipeline file.
        work: The folder that contains the work folders of all pipelines, or its URL.
        reporter: Shows progress, and the standard error of the containers.
        flags: Further options of `gaudi-bert run` for each stage, such as `--overwrite` and every `--set`.

    Returns:
        For each stage, the lines of its standard output.

    Raises:
        InputError: An input file is missing, no daemon answers, an image is missing, the daemon rejects a container, or a
            stage ended because of wrong input.
        FailedError: A stage failed, ran out of memory, or another run uses the work folder.
        StoppedError: The run was stopped by a signal.
    """
    for missing in missing_paths(settings, stages, pipeline.parent):
        raise InputError(f"{missing}; check the path")
    containers = {stage: _stage_container(settings, stage, pipeline, work, flags) for stage in stages}
    daemon = _connect()
    stop = _Stop()
    printed = {}
    with handle_signals((signal.SIGTERM, signal.SIGINT), stop.request), _explained():
        _clear_leftovers(daemon, format_location(_work_folder(settings, work)))
        for image in dict.fromkeys(options["image"] for options in containers.values()):
            _need_image(daemon, image, settings.images, reporter)
        for stage, options in containers.items():
            stop.check()
            reporter.say(f"docker: {stage} in {options['image']}")
            if settings.store.scratch:
                Path(settings.store.scratch).mkdir(parents=True, exist_ok=True)  # a bind mount needs an existing folder
            memory_key = f"resources.{'training' if STAGES[stage].trains else 'data'}.memory_limit"
            printed[stage] = _run_container(daemon, options, stop, reporter, memory_key)
    return printed


# --- from a pipeline file to Docker's options


def _stage_container(
    settings: PipelineSettings, stage: str, pipeline: Path, work: Path, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the keyword arguments of `docker.containers.create` for the container of a stage.

    Raises:
        InputError: Several workers would use cards, or a mounted path would hide files of the image.
    """
    resources, row = settings.resources, STAGES[stage]
    if row.distributed and resources.cards and resources.workers > 1:
        raise InputError(
            f"resources.workers = {resources.workers} with cards: --on docker uses the cards of one server, as one worker; "
            "use --on kubernetes for several servers"
        )
    parent = format_location(work) if is_in_store(work) else os.path.abspath(work)
    command = ["gaudi-bert", "run", os.path.abspath(pipeline), "--work", parent, "--stages", stage, *flags]
    if not row.trains and "--workers" not in flags:
        # Each process uses memory, so the default of one process per core could exceed the container's memory limit.
        command += ["--workers", str(resources.data_processes)]
    folder = _work_folder(settings, work)
    read = [(key, text) for key, text in named_paths(settings) if key in row.reads]
    urls = [text for text in (str(folder), *(text for _, text in read)) if is_in_store(text)]
    variables, mounts = _store_access(settings, urls) if urls else ({}, {})
    mounts |= {path: True for key, text in read for path in _shown(key, text, pipeline.parent)}
    mounts[pipeline.absolute()] = True
    if not is_in_store(work):
        mounts[folder.absolute()] = False
    for path, folder_of_image in itertools.product(mounts, _OF_THE_IMAGE):
        if folder_of_image.is_relative_to(path):
            raise InputError(
                f"{path}: in a container, {folder_of_image} is the image's own; put the files into a folder of their own"
            )
    pod, with_cards = resources.training if row.trains else resources.data, row.trains and resources.cards > 0
    if with_cards:
        variables |= {"HABANA_VISIBLE_DEVICES": settings.docker.visible_devices, **card_variables("/tmp/gaudi-bert-recipes")}
    memory, cores = int(quantity_value(pod.memory_limit or pod.memory)), quantity_value(pod.cpu)
    return {
        "image": stage_image(settings, row),
        "name": f"gaudi-bert-{settings.name}-{stage}-{secrets.token_hex(4)}",
        "labels": {_WORK_LABEL: format_location(folder)},
        "entrypoint": command,
        "environment": {"HOME": "/tmp", **variables, **(resources.environment if row.trains else {})},
        "mounts": [
            {"Type": "bind", "Source": str(path), "Target": str(path), "ReadOnly": read_only}
            for path, read_only in mounts.items()
        ],
        "working_dir": os.getcwd(),  # because paths on the command line may be relative to it
        "init": True,
        # The limit of memory and swap together equals that of memory, so that a container that exceeds it is killed.
        # Otherwise it would swap and slow down.
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": int(settings.docker.cpus * 1e9) if settings.docker.cpus else None,
        **({"network_mode": "host"} if urls else {}),
        **(_with_cards(settings.docker, cores) if with_cards else _confined(folder, cores)),
        **({"shm_size": int(quantity_value(resources.shared_memory))} if row.trains and not resources.cards else {}),
    }


def _work_folder(settings: PipelineSettings, work: Path) -> Path:
    """Return the work folder of this pipeline, as an absolute path or a URL."""
    return work / settings.name if is_in_store(work) else work.absolute() / settings.name


def _shown(key: str, text: str, pipeline_folder: Path) -> Iterator[Path]:
    """Yield the paths to mount for one setting that names a file.

    An existing path is mounted itself. For a glob, a checkpoint file or a checkpoint prefix, the closest existing parent
    folder is mounted. For records, the `vocab.txt` next to their folder is mounted too, if it exists. A URL yields nothing.

    Args:
        key: The setting, such as `prepare.text`.
        text: The path, glob or URL that the setting contains.
        pipeline_folder: The folder that relative paths start from, unless the setting is a checkpoint.
    """
    if is_in_store(text):
        return
    is_checkpoint = key.endswith(".init_checkpoint")
    path = Path(os.path.abspath((Path() if is_checkpoint else pipeline_folder) / Path(text).expanduser()))
    if not path.exists() or (is_checkpoint and path.is_file()):
        path = next(parent for parent in path.parents if parent.is_dir() and not glob.has_magic(str(parent)))
    yield path
    vocabulary = (path if path.is_dir() else path.parent).parent / "vocab.txt"
    if key.endswith("records") and vocabulary.is_file():
        yield vocabulary


# Folders that contain the image's own files. A mounted host folder at or above one of them would hide these files.
_OF_THE_IMAGE = [
    *map(Path, ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/tmp", "/usr")),
    *map(Path, ("/opt/venv", "/opt/gaudi-bert", "/opt/habanalabs", "/opt/amazon")),
]


def _confined(folder: Path, cores: float) -> dict[str, Any]:
    """Return Docker's options for a container without cards, which runs as the caller and without capabilities.

    If the caller is root, the container runs as the owner of the work folder instead. A local work folder is created if it
    does not exist, because otherwise the daemon would create it as root.
    """
    user, group = os.getuid(), os.getgid()
    if not is_in_store(folder):
        with explain_os_errors(folder, "make"):
            folder.mkdir(parents=True, exist_ok=True)
        user, group = (user, group) if user else (folder.stat().st_uid, folder.stat().st_gid)
    return {
        "user": f"{user}:{group}",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "cpu_shares": max(int(cores * 1024), 2),
    }


def _with_cards(docker: DockerSettings, cores: float) -> dict[str, Any]:
    """Return Docker's options for a container with Gaudi cards, as the vendor's software requires them."""
    return {
        "user": "0:0",
        "runtime": docker.runtime,
        "ipc_mode": "host",
        "cap_add": ["SYS_NICE"],
        "nano_cpus": int((docker.cpus or cores) * 1e9),
        **({"network_mode": "host"} if docker.host_network else {}),
        **({"ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}]} if docker.unlimited_memory_lock else {}),
    }


# The credentials that the clients of each kind of store read: the prefixes of their environment variables, and for some
# variables the default path below the home folder that is used if the variable is not set.
_AWS = ("AWS_",), {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}
_GOOGLE = ("GOOGLE_", "CLOUDSDK_"), {"CLOUDSDK_CONFIG": ".config/gcloud"}
_AZURE = ("AZURE_",), {"AZURE_CONFIG_DIR": ".azure"}
_STORE_TOOLS = {"s3": _AWS, "s3a": _AWS, "gs": _GOOGLE, "gcs": _GOOGLE, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE}
_FOR_ALL_STORES = ("FSSPEC_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def _store_access(settings: PipelineSettings, urls: Sequence[str]) -> tuple[dict[str, str], dict[Path, bool]]:
    """Return what a container needs to use the object stores of `urls`.

    Returns:
        The environment variables with the caller's credentials, and the paths to mount, each with whether it is mounted
        read-only. The paths are those that the variables name, `store.ca_file` and `store.scratch`.
    """
    variables: dict[str, str] = {}
    for prefixes, usual_paths in [_STORE_TOOLS.get(scheme, ((), {})) for scheme in {*map(store_scheme, urls)}]:
        variables |= {name: str(Path.home() / path) for name, path in usual_paths.items() if (Path.home() / path).exists()}
        variables |= {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    variables |= {name: value for name, value in os.environ.items() if name.upper().startswith(_FOR_ALL_STORES)}
    mounts = {Path(value): True for value in variables.values() if value.startswith("/") and Path(value).exists()}
    if settings.store.ca_file:
        mounts[Path(settings.store.ca_file).absolute()] = True
    if settings.store.scratch:
        mounts[Path(settings.store.scratch).absolute()] = False
    return variables, mounts


# --- the daemon


def _connect() -> Any:
    """Return a client of the Docker daemon that the environment names.

    Raises:
        InputError: The daemon does not answer, or the caller may not use it.
    """
    from docker.client import from_env
    from docker.errors import DockerException

    try:
        client = from_env(timeout=_ANSWER_SECONDS)
        client.ping()
    except DockerException as error:
        address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        reason = " ".join(str(error).split())
        raise InputError(
            f"--on docker: no Docker daemon can be used at {address} ({reason}); start it, or name another in DOCKER_HOST; "
            "a user who is not root must be in the group `docker`"
        ) from error
    return client


@contextmanager
def _explained() -> Iterator[None]:
    """Convert errors of the Docker client into one-line errors that contain the daemon's own message.

    Raises:
        InputError: The daemon rejected a request, or lacks the container runtime.
        FailedError: The daemon failed or no longer answers.
    """
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except APIError as error:
        reason = " ".join(str(error.explanation or error).split())
        refused = error.response is not None and error.response.status_code < 500
        kind = InputError if refused or "runtime" in reason else FailedError
        raise kind(f"--on docker: the daemon refuses: {reason}; correct the section docker, or the image") from error
    except (DockerException, RequestException) as error:
        reason = " ".join(str(error).split())
        raise FailedError(f"--on docker: the daemon does not answer any more ({reason}); start it, run again") from error


def _clear_leftovers(daemon: Any, work: str) -> None:
    """Remove the containers that earlier runs in this work folder left behind.

    Raises:
        FailedError: A container of another run still works in the folder.
    """
    for container in daemon.containers.list(all=True, filters={"label": f"{_WORK_LABEL}={work}"}):
        if container.status in ("running", "paused", "restarting"):
            raise FailedError(
                f"{work}: container {container.name} of another run works in it; "
                f"wait for its end, or remove it: docker rm --force {container.name}"
            )
        container.remove(force=True, v=True)


def _need_image(daemon: Any, reference: str, images: ImageSettings, reporter: Reporter) -> None:
    """Make sure that an image is on this machine, and pull it from its registry if `images.pull_policy` says so.

    Raises:
        InputError: The image is missing and may not be pulled, or the registry does not provide it.
    """
    from docker.errors import APIError, NotFound

    if images.pull_policy != "Always":
        try:
            daemon.images.get(reference)
        except NotFound:
            pass
        else:
            return
    if images.pull_policy == "Never" or images.registry is None:
        raise InputError(f"image {reference}: not on this machine; build it with `make images`, or set images.registry")
    reporter.say(f"docker: fetching {reference}")
    try:
        daemon.images.pull(reference)
    except APIError as error:
        reason = " ".join(str(error.explanation or error).split())
        raise InputError(f"image {reference}: cannot be fetched: {reason}; check images.registry, `docker login`") from error


# --- one container


class _Stop:
    """Forwards stop signals of this process to the running container.

    The first signal stops the container gracefully, so that it can save. The second signal kills it.

    Attributes:
        container: The running container, or None between two containers.
        requests: The number of signals received so far.
    """

    def __init__(self) -> None:
        self.container: Any = None
        self.requests = 0

    def request(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.requests += 1
        self.pass_on()

    def pass_on(self) -> None:
        """Stop or kill the container, if there is one and a signal was received. Returns at once."""
        if self.requests and self.container is not None:
            # A signal handler runs in the main thread, which may hold a lock of the client, so calling the client here could
            # deadlock. Another thread calls it.
            threading.Thread(target=self._end, args=(self.container, self.requests > 1), daemon=True).start()

    def check(self) -> None:
        """Raise a `StoppedError` if a signal was received, so that no further stage begins."""
        if self.requests:
            raise StoppedError("stopped on request; run the same command again to resume")

    @staticmethod
    def _end(container: Any, at_once: bool) -> None:
        """Kill a container, or stop it and wait until it has ended."""
        from docker.errors import APIError

        with suppress(APIError):  # raised if the container has already ended
            if at_once:
                container.kill()
            else:
                # The daemon answers only when the container has ended, so the client must wait longer than that takes.
                container.client.api.timeout = _ANSWER_SECONDS + _STOP_SECONDS
                container.stop(timeout=_STOP_SECONDS)


def _run_container(daemon: Any, options: Mapping[str, Any], stop: _Stop, reporter: Reporter, memory_key: str) -> list[str]:
    """Run a container to its end and return the lines of its standard output. Its standard error is shown while it runs.

    The container is removed at the end, also after an error.

    Args:
        daemon: The Docker client.
        options: The keyword arguments for creating the container.
        stop: Stops the container when this process receives a signal.
        reporter: Shows the standard error.
        memory_key: The setting of the memory limit, for the error message.

    Raises:
        InputError: The container ended with the exit code for wrong input.
        FailedError: The container ran out of memory, or ended with another exit code than 0.
        StoppedError: The container was stopped.
    """
    container = daemon.containers.create(**options)
    try:
        pieces = container.attach(stream=True, stdout=True, stderr=True, demux=True)
        container.start()
        stop.container = container
        stop.pass_on()
        printed, reason = _follow(pieces, reporter)
        container.wait()
        container.reload()
    finally:
        stop.container = None
        container.remove(force=True, v=True)
    state = container.attrs["State"]
    code = int(state["ExitCode"])
    if state.get("OOMKilled") and code:
        raise FailedError(f"container {container.name} used more memory than it may; raise {memory_key}")
    if code == StoppedError.exit_code or (code and stop.requests > 1):
        raise StoppedError(reason or "stopped on request; run the same command again to resume")
    if code:
        why = state.get("Error") or "see its last words above"
        kind = InputError if code == InputError.exit_code else FailedError
        raise kind(reason or f"{container.name} ended with exit code {code}; {why}")
    return printed


def _follow(pieces: Any, reporter: Reporter) -> tuple[list[str], str]:
    """Show a container's standard error line by line, and collect its standard output.

    Args:
        pieces: Pairs of bytes from standard output and standard error, each of which may be None.
        reporter: Shows the lines of standard error.

    Returns:
        The lines of standard output, and the error message if the last line of standard error is one, otherwise "". This
        last line is not shown.
    """
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2)]
    rests, printed, held = ["", ""], [], ""
    for pair in pieces:
        for number, piece in enumerate(pair):
            *lines, rests[number] = (rests[number] + decoders[number].decode(piece or b"")).split("\n")
            if number == 0:
                printed += lines
                continue
            for line in lines:
                if held:
                    reporter.say(held)
                # This process raises the error of the container and prints it at the end, so do not print it twice.
                held = line if line.startswith("error: ") else ""
                if not held:
                    reporter.say(line)
    return [*printed, *filter(None, rests[:1])], held.removeprefix("error: ")
