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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.common.files import explain_os_errors, format_location, is_in_store, store_scheme
from gaudi_bert.common.launch import handle_signals
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import DockerSettings, ImageSettings
from gaudi_bert.runners.stage_table import (
    STAGES,
    describe_missing_inputs,
    list_input_paths,
    parse_quantity,
    stage_image_name,
)
from gaudi_bert.runners.training_processes import build_card_environment

if TYPE_CHECKING:
    from docker.models.containers import Container

    from docker import DockerClient

_ANSWER_SECONDS = 60
# A training process that is stopped first finishes its update and saves a checkpoint, so wait this long before it is killed.
_STOP_SECONDS = 120
# The label's value is the work folder. It identifies the containers that a killed run left behind.
_WORK_LABEL = "gaudi-bert.work"


def run_on_docker(
    settings: PipelineSettings,
    stages: Sequence[str],
    pipeline_file: Path,
    work_root: Path,
    reporter: Reporter,
    *,
    extra_options: Sequence[str] = (),
) -> dict[str, list[str]]:
    """Run stages in the given order, each in its own container, and return the lines that each stage printed.

    A signal SIGTERM or SIGINT is passed on to the running container, which then saves and stops.

    Args:
        settings: The settings of the pipeline.
        stages: The names of the stages.
        pipeline_file: The pipeline file.
        work_root: The folder that contains the work folders of all pipelines, or its URL.
        reporter: Shows progress, and the standard error of the containers.
        extra_options: Further options of `gaudi-bert run` for each stage, such as `--overwrite` and every `--set`.

    Returns:
        For each stage, the lines of its standard output.

    Raises:
        InputError: An input file is missing, no daemon answers, an image is missing, the daemon rejects a container, or a
            stage ended because of wrong input.
        FailedError: A stage failed, ran out of memory, or another run uses the work folder.
        StoppedError: The run was stopped by a signal.
    """
    for missing in describe_missing_inputs(settings, stages, pipeline_file.parent):
        raise InputError(f"{missing}; check the path")
    containers = {
        stage: _build_container_options(settings, stage, pipeline_file, work_root, extra_options) for stage in stages
    }
    client = _connect_to_daemon()
    stopper = _ContainerStopper()
    printed = {}
    with handle_signals((signal.SIGTERM, signal.SIGINT), stopper.handle_signal), _convert_docker_errors():
        _remove_leftover_containers(client, format_location(_pipeline_work_folder(settings, work_root)))
        for image in dict.fromkeys(options["image"] for options in containers.values()):
            _pull_image_if_needed(client, image, settings.images, reporter)
        for stage, options in containers.items():
            stopper.raise_if_requested()
            reporter.say(f"docker: {stage} in {options['image']}")
            if settings.store.scratch:
                Path(settings.store.scratch).mkdir(parents=True, exist_ok=True)  # a bind mount needs an existing folder
            memory_setting = f"resources.{'training' if STAGES[stage].runs_model else 'data'}.memory_limit"
            printed[stage] = _run_container(client, options, stopper, reporter, memory_setting)
    return printed


# --- from a pipeline file to Docker's options


def _build_container_options(
    settings: PipelineSettings, stage: str, pipeline_file: Path, work_root: Path, extra_options: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the keyword arguments with which `docker.containers.create` creates the container of a stage.

    Raises:
        InputError: Several workers would use cards, or a mounted path would hide files of the image.
    """
    resources, stage_row = settings.resources, STAGES[stage]
    if stage_row.is_distributed and resources.cards and resources.workers > 1:
        raise InputError(
            f"resources.workers = {resources.workers} with cards: --on docker supports only one worker with cards, "
            "because it uses a single server; use --on kubernetes for several servers"
        )
    parent = format_location(work_root) if is_in_store(work_root) else os.path.abspath(work_root)
    command = ["gaudi-bert", "run", os.path.abspath(pipeline_file), "--work", parent, "--stages", stage, *extra_options]
    if not stage_row.runs_model and "--workers" not in extra_options:
        # Each process uses memory, so the default of one process per core could exceed the container's memory limit.
        command += ["--workers", str(resources.data_processes)]
    folder = _pipeline_work_folder(settings, work_root)
    read = [(key, text) for key, text in list_input_paths(settings) if key in stage_row.input_settings]
    urls = [text for text in (str(folder), *(text for _, text in read)) if is_in_store(text)]
    variables, mounts = _find_store_access(settings, urls) if urls else ({}, {})
    mounts |= {path: True for key, text in read for path in _paths_to_mount(key, text, pipeline_file.parent)}
    mounts[pipeline_file.absolute()] = True
    if not is_in_store(work_root):
        mounts[folder.absolute()] = False
    for path, folder_of_image in itertools.product(mounts, _IMAGE_FOLDERS):
        if folder_of_image.is_relative_to(path):
            raise InputError(
                f"{path}: mounting this path would hide {folder_of_image} of the image; move the files to another folder"
            )
    pod, with_cards = (
        resources.training if stage_row.runs_model else resources.data,
        stage_row.runs_model and resources.cards > 0,
    )
    if with_cards:
        variables |= {
            "HABANA_VISIBLE_DEVICES": settings.docker.visible_devices,
            **build_card_environment("/tmp/gaudi-bert-recipes"),
        }
    memory, cores = int(parse_quantity(pod.memory_limit or pod.memory)), parse_quantity(pod.cpu)
    return {
        "image": stage_image_name(settings, stage_row),
        "name": f"gaudi-bert-{settings.name}-{stage}-{secrets.token_hex(4)}",
        "labels": {_WORK_LABEL: format_location(folder)},
        "entrypoint": command,
        "environment": {"HOME": "/tmp", **variables, **(resources.environment if stage_row.runs_model else {})},
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
        **(_build_card_options(settings.docker, cores) if with_cards else _build_unprivileged_options(folder, cores)),
        **(
            {"shm_size": int(parse_quantity(resources.shared_memory))}
            if stage_row.runs_model and not resources.cards
            else {}
        ),
    }


def _pipeline_work_folder(settings: PipelineSettings, work_root: Path) -> Path:
    """Return the work folder of this pipeline, as an absolute path or a URL."""
    return work_root / settings.name if is_in_store(work_root) else work_root.absolute() / settings.name


def _paths_to_mount(setting: str, text: str, pipeline_folder: Path) -> Iterator[Path]:
    """Yield the paths that the container must mount so that it can read the file that a setting names.

    An existing path is mounted itself. For a glob, a checkpoint file or a checkpoint prefix, the closest existing parent
    folder is mounted. For records, the `vocab.txt` next to their folder is mounted too, if it exists. A URL yields nothing.

    Args:
        setting: The setting, such as `prepare.text`.
        text: The path, glob or URL that the setting contains.
        pipeline_folder: The folder that relative paths start from, unless the setting is a checkpoint.
    """
    if is_in_store(text):
        return
    is_checkpoint = setting.endswith(".init_checkpoint")
    path = Path(os.path.abspath((Path() if is_checkpoint else pipeline_folder) / Path(text).expanduser()))
    if not path.exists() or (is_checkpoint and path.is_file()):
        path = next(parent for parent in path.parents if parent.is_dir() and not glob.has_magic(str(parent)))
    yield path
    vocabulary = (path if path.is_dir() else path.parent).parent / "vocab.txt"
    if setting.endswith("records") and vocabulary.is_file():
        yield vocabulary


# Folders that contain the image's own files. A mounted host folder at or above one of them would hide these files.
_IMAGE_FOLDERS = [
    *map(Path, ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/tmp", "/usr")),
    *map(Path, ("/opt/venv", "/opt/gaudi-bert", "/opt/habanalabs", "/opt/amazon")),
]


def _build_unprivileged_options(work_folder: Path, cpu_cores: float) -> dict[str, Any]:
    """Return Docker options for a container without cards, which runs as the user of this process and without capabilities.

    If the caller is root, the container runs as the owner of the work folder instead. A local work folder is created if it
    does not exist, because otherwise the daemon would create it as root.
    """
    user, group = os.getuid(), os.getgid()
    if not is_in_store(work_folder):
        with explain_os_errors(work_folder, "make"):
            work_folder.mkdir(parents=True, exist_ok=True)
        user, group = (user, group) if user else (work_folder.stat().st_uid, work_folder.stat().st_gid)
    return {
        "user": f"{user}:{group}",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "cpu_shares": max(int(cpu_cores * 1024), 2),
    }


def _build_card_options(docker: DockerSettings, cpu_cores: float) -> dict[str, Any]:
    """Return Docker options for a container that uses Gaudi cards, as the vendor's software requires them."""
    return {
        "user": "0:0",
        "runtime": docker.runtime,
        "ipc_mode": "host",
        "cap_add": ["SYS_NICE"],
        "nano_cpus": int((docker.cpus or cpu_cores) * 1e9),
        **({"network_mode": "host"} if docker.host_network else {}),
        **({"ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}]} if docker.unlimited_memory_lock else {}),
    }


# The credentials that the clients of each kind of store read: the prefixes of their environment variables, and for some
# variables the default path below the home folder that is used if the variable is not set.
_AWS = ("AWS_",), {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}
_GOOGLE = ("GOOGLE_", "CLOUDSDK_"), {"CLOUDSDK_CONFIG": ".config/gcloud"}
_AZURE = ("AZURE_",), {"AZURE_CONFIG_DIR": ".azure"}
_STORE_CREDENTIALS = {"s3": _AWS, "s3a": _AWS, "gs": _GOOGLE, "gcs": _GOOGLE, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE}
_COMMON_VARIABLE_PREFIXES = ("FSSPEC_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class _StoreAccess(NamedTuple):
    """The environment variables and mounts that a container needs to use object stores.

    Attributes:
        environment: The environment variables with the caller's credentials.
        read_only_by_path: The paths to mount, and for each path whether it is mounted read-only.
    """

    environment: dict[str, str]
    read_only_by_path: dict[Path, bool]


def _find_store_access(settings: PipelineSettings, store_urls: Sequence[str]) -> _StoreAccess:
    """Return the environment variables and mounts with which a container can use the object stores of some URLs.

    The mounted paths are those that the variables name, `store.ca_file` and `store.scratch`.
    """
    variables: dict[str, str] = {}
    for prefixes, usual_paths in [_STORE_CREDENTIALS.get(scheme, ((), {})) for scheme in {*map(store_scheme, store_urls)}]:
        variables |= {name: str(Path.home() / path) for name, path in usual_paths.items() if (Path.home() / path).exists()}
        variables |= {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    variables |= {name: value for name, value in os.environ.items() if name.upper().startswith(_COMMON_VARIABLE_PREFIXES)}
    mounts = {Path(value): True for value in variables.values() if value.startswith("/") and Path(value).exists()}
    if settings.store.ca_file:
        mounts[Path(settings.store.ca_file).absolute()] = True
    if settings.store.scratch:
        mounts[Path(settings.store.scratch).absolute()] = False
    return _StoreAccess(variables, mounts)


# --- the daemon


def _connect_to_daemon() -> DockerClient:
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
            f"--on docker: the Docker daemon at {address} cannot be used ({reason}); start it, or set DOCKER_HOST to "
            "another "
            "daemon; a user who is not root must be in the group `docker`"
        ) from error
    return client


@contextmanager
def _convert_docker_errors() -> Iterator[None]:
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
        raise kind(
            f"--on docker: the Docker daemon rejected the request: {reason}; correct the section docker of the pipeline "
            "file, or the image"
        ) from error
    except (DockerException, RequestException) as error:
        reason = " ".join(str(error).split())
        raise FailedError(
            f"--on docker: the Docker daemon no longer answers ({reason}); restart it, then run the same command again"
        ) from error


def _remove_leftover_containers(client: DockerClient, work_folder: str) -> None:
    """Remove the containers that earlier runs in this work folder left behind.

    Raises:
        FailedError: A container of another run still works in the folder.
    """
    for container in client.containers.list(all=True, filters={"label": f"{_WORK_LABEL}={work_folder}"}):
        if container.status in ("running", "paused", "restarting"):
            raise FailedError(
                f"{work_folder}: container {container.name} of another run uses this work folder; "
                f"wait until it ends, or remove it: docker rm --force {container.name}"
            )
        container.remove(force=True, v=True)


def _pull_image_if_needed(client: DockerClient, image: str, images: ImageSettings, reporter: Reporter) -> None:
    """Make sure that an image is on this machine, and pull it from its registry if `images.pull_policy` says so.

    Raises:
        InputError: The image is missing and may not be pulled, or the registry does not provide it.
    """
    from docker.errors import APIError, NotFound

    if images.pull_policy != "Always":
        try:
            client.images.get(image)
        except NotFound:
            pass
        else:
            return
    if images.pull_policy == "Never" or images.registry is None:
        raise InputError(
            f"image {image}: not found on this machine; build it with `make images`, or set images.registry to pull it"
        )
    reporter.say(f"docker: pulling {image}")
    try:
        client.images.pull(image)
    except APIError as error:
        reason = " ".join(str(error.explanation or error).split())
        raise InputError(
            f"image {image}: cannot be pulled: {reason}; check images.registry, and log in with `docker login`"
        ) from error


# --- one container

# Pairs of bytes from standard output and standard error, each of which may be None.
_OutputChunks = Iterable[tuple[bytes | None, bytes | None]]


class _ContainerStopper:
    """Stops the running container if this process receives a stop signal.

    The first signal stops the container gracefully, so that it can save. The second signal kills it.

    Attributes:
        container: The running container, or None between two containers.
        requests: The number of signals received so far.
    """

    def __init__(self) -> None:
        self.container: Container | None = None
        self.requests = 0

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Count a stop signal, and stop the running container. The second signal kills the container."""
        self.requests += 1
        self.stop_container_if_requested()

    def stop_container_if_requested(self) -> None:
        """Stop or kill the container in a thread, if a container runs and a signal was received. Return at once."""
        if self.requests and self.container is not None:
            # A signal handler runs in the main thread, which may hold a lock of the client, so calling the client here could
            # deadlock. Another thread calls it.
            threading.Thread(target=self._stop_or_kill, args=(self.container, self.requests > 1), daemon=True).start()

    def raise_if_requested(self) -> None:
        """Raise a `StoppedError` if a stop signal was received, so that no further stage begins."""
        if self.requests:
            raise StoppedError("stopped on request; run the same command again to resume")

    @staticmethod
    def _stop_or_kill(container: Container, kill: bool) -> None:
        """Kill a container, or stop it and wait until it has ended."""
        from docker.errors import APIError

        with suppress(APIError):  # raised if the container has already ended
            if kill:
                container.kill()
            else:
                # The daemon answers only when the container has ended, so the client must wait longer than that takes.
                container.client.api.timeout = _ANSWER_SECONDS + _STOP_SECONDS
                container.stop(timeout=_STOP_SECONDS)


def _run_container(
    client: DockerClient, options: Mapping[str, Any], stopper: _ContainerStopper, reporter: Reporter, memory_setting: str
) -> list[str]:
    """Run a container to its end and return the lines of its standard output. Its standard error is shown while it runs.

    The container is removed at the end, also after an error.

    Args:
        client: The Docker client.
        options: The keyword arguments for creating the container.
        stopper: Stops the container when this process receives a signal.
        reporter: Shows the standard error.
        memory_setting: The setting of the memory limit, for the error message.

    Raises:
        InputError: The container ended with the exit code for wrong input.
        FailedError: The container ran out of memory, or ended with another exit code than 0.
        StoppedError: The container was stopped.
    """
    container = client.containers.create(**options)
    try:
        pieces = container.attach(stream=True, stdout=True, stderr=True, demux=True)
        container.start()
        stopper.container = container
        stopper.stop_container_if_requested()
        output = _read_container_output(pieces, reporter)
        container.wait()
        container.reload()
    finally:
        stopper.container = None
        container.remove(force=True, v=True)
    state = container.attrs["State"]
    code = int(state["ExitCode"])
    if state.get("OOMKilled") and code:
        raise FailedError(f"container {container.name} exceeded its memory limit; raise {memory_setting}")
    if code == StoppedError.exit_code or (code and stopper.requests > 1):
        raise StoppedError(output.error or "stopped on request; run the same command again to resume")
    if code:
        why = state.get("Error") or "see its last lines above"
        kind = InputError if code == InputError.exit_code else FailedError
        raise kind(output.error or f"container {container.name} ended with exit code {code}; {why}")
    return output.lines


class _ContainerOutput(NamedTuple):
    """The output of a container that has ended: the lines of standard output, and the final error.

    Attributes:
        lines: The lines of standard output.
        error: The error message if the last line of standard error is one, otherwise "".
    """

    lines: list[str]
    error: str


def _read_container_output(output_chunks: _OutputChunks, reporter: Reporter) -> _ContainerOutput:
    """Show a container's standard error line by line, and collect its standard output.

    Args:
        output_chunks: Pairs of bytes from standard output and standard error, each of which may be None.
        reporter: Shows the lines of standard error.

    Returns:
        The lines of standard output, and the error message in the last line of standard error, which is not shown.
    """
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2)]
    rests, printed, held = ["", ""], [], ""
    for pair in output_chunks:
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
    return _ContainerOutput([*printed, *filter(None, rests[:1])], held.removeprefix("error: "))
