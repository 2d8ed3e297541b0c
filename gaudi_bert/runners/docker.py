"""Run the stages of a pipeline in Docker containers on this machine, for `gaudi-bert run --on docker`.

Each stage runs as `gaudi-bert run PIPELINE --stages STAGE` in a new container of the stage's image. The container runs as
the caller's user and has no Linux capabilities. It mounts the work folder, and mounts the input files of the pipeline
read-only. All paths are the same as on the host. A stage that trains on Gaudi cards runs as root instead, with the vendor's
container runtime. A stage that uses an object store also gets the caller's credentials for that store, and uses the network
of the host.

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
from gaudi_bert.common.files import explain_os_errors, format_location, get_store_scheme, is_in_store
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
from gaudi_bert.runners.training_processes import build_accelerator_environment

if TYPE_CHECKING:
    from docker.models.containers import Container

    from docker import DockerClient

_ANSWER_SECONDS = 60
# A stopped training process needs time to finish its update and to save a checkpoint, so it is killed only after this time.
_STOP_SECONDS = 120
# Each container has this label, which contains the path of its work folder. It lets a later run find the containers that a
# killed run left behind.
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

    If this process receives SIGTERM or SIGINT, the running container is stopped, so that its stage saves and ends.

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
            pod = "training" if STAGES[stage].runs_model else "data"
            printed[stage] = _run_container(client, options, stopper, reporter, f"resources.{pod}.memory_limit")
    return printed


# --- from a pipeline file to Docker's options


def _build_container_options(
    settings: PipelineSettings, stage: str, pipeline_file: Path, work_root: Path, extra_options: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the arguments of `docker.containers.create` for the container of a stage.

    Raises:
        InputError: Several workers would use cards, or a mounted path would hide files of the image.
    """
    resources, stage_row = settings.resources, STAGES[stage]
    if stage_row.is_distributed and resources.cards and resources.workers > 1:
        raise InputError(
            f"resources.workers = {resources.workers}: --on docker runs on a single server, where only one worker can "
            "use Gaudi cards; set resources.workers to 1, or use --on kubernetes for several servers"
        )
    parent = format_location(work_root) if is_in_store(work_root) else os.path.abspath(work_root)
    command = ["gaudi-bert", "run", os.path.abspath(pipeline_file), "--work", parent, "--stages", stage, *extra_options]
    if not stage_row.runs_model and "--workers" not in extra_options:
        # By default, a stage starts one worker per core of the host, which could exceed the container's memory limit. So
        # pass a number of workers that suits the limit.
        command += ["--workers", str(resources.data_processes)]
    folder = _pipeline_work_folder(settings, work_root)
    read = [(key, text) for key, text in list_input_paths(settings) if key in stage_row.input_settings]
    urls = [text for text in (str(folder), *(text for _, text in read)) if is_in_store(text)]
    variables, mounts = _find_store_access(settings, urls) if urls else ({}, {})
    mounts |= {path: True for key, text in read for path in _find_paths_to_mount(key, text, pipeline_file.parent)}
    mounts[pipeline_file.absolute()] = True
    if not is_in_store(work_root):
        mounts[folder.absolute()] = False
    for path, folder_of_image in itertools.product(mounts, _IMAGE_FOLDERS):
        if folder_of_image.is_relative_to(path):
            raise InputError(
                f"{path}: mounting this path would hide {folder_of_image} of the image; move the files to another folder"
            )
    pod = resources.training if stage_row.runs_model else resources.data
    with_cards = stage_row.runs_model and resources.cards > 0
    if with_cards:
        variables |= {
            "HABANA_VISIBLE_DEVICES": settings.docker.visible_devices,
            **build_accelerator_environment("/tmp/gaudi-bert-recipes"),
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
        # A container that exceeds its memory limit should be killed, not slowed down by swapping. The second limit covers
        # memory plus swap, so equal limits allow no swap.
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": int(settings.docker.cpus * 1e9) if settings.docker.cpus else None,
        **({"network_mode": "host"} if urls else {}),
        **(_build_accelerator_options(settings.docker, cores) if with_cards else _build_unprivileged_options(folder, cores)),
        **(
            {"shm_size": int(parse_quantity(resources.shared_memory))}
            if stage_row.runs_model and not resources.cards
            else {}
        ),
    }


def _pipeline_work_folder(settings: PipelineSettings, work_root: Path) -> Path:
    """Return the work folder of this pipeline, as an absolute path or a URL."""
    return work_root / settings.name if is_in_store(work_root) else work_root.absolute() / settings.name


def _find_paths_to_mount(setting: str, text: str, pipeline_folder: Path) -> Iterator[Path]:
    """Yield the paths on the host that a container must mount to read one input of the pipeline.

    An existing path is mounted itself. For a glob, a checkpoint file or a checkpoint prefix, the closest existing parent
    folder is mounted. For records, a `vocab.txt` next to their folder is also mounted if it exists. A URL yields nothing.

    Args:
        setting: The setting that names the input, such as `prepare.text`.
        text: The path, glob or URL in this setting.
        pipeline_folder: The folder that relative paths start from. The path of a checkpoint starts from the current folder.
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


# These folders contain files of the image. A host folder that is mounted at or above one of them would hide these files.
_IMAGE_FOLDERS = [
    *map(Path, ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/tmp", "/usr")),
    *map(Path, ("/opt/venv", "/opt/gaudi-bert", "/opt/habanalabs", "/opt/amazon")),
]


def _build_unprivileged_options(work_folder: Path, cpu_cores: float) -> dict[str, Any]:
    """Return Docker options for a container that uses no accelerator cards and runs without root privileges.

    The container runs as the user of this process. If this user is root, the container runs as the owner of the work folder
    instead. A local work folder is created if it does not exist, because the Docker daemon would create it as root.
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


def _build_accelerator_options(docker: DockerSettings, cpu_cores: float) -> dict[str, Any]:
    """Return Docker options that give a container access to the Gaudi accelerators. The vendor's software requires all of
    these options.
    """
    return {
        "user": "0:0",
        "runtime": docker.runtime,
        "ipc_mode": "host",
        "cap_add": ["SYS_NICE"],
        "nano_cpus": int((docker.cpus or cpu_cores) * 1e9),
        **({"network_mode": "host"} if docker.host_network else {}),
        **({"ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}]} if docker.unlimited_memory_lock else {}),
    }


# Each client of an object store reads its credentials from environment variables with these prefixes. Some variables contain
# the path of a file or folder. If such a variable is not set, the client uses the listed path in the home folder.
_AWS = ("AWS_",), {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}
_GOOGLE = ("GOOGLE_", "CLOUDSDK_"), {"CLOUDSDK_CONFIG": ".config/gcloud"}
_AZURE = ("AZURE_",), {"AZURE_CONFIG_DIR": ".azure"}
_STORE_CREDENTIALS = {"s3": _AWS, "s3a": _AWS, "gs": _GOOGLE, "gcs": _GOOGLE, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE}
_COMMON_VARIABLE_PREFIXES = ("FSSPEC_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class _StoreAccess(NamedTuple):
    """The environment variables and mounts that give a container access to object stores.

    Attributes:
        environment: The environment variables with the caller's credentials.
        read_only_by_path: The paths to mount, and for each path whether it is mounted read-only.
    """

    environment: dict[str, str]
    read_only_by_path: dict[Path, bool]


def _find_store_access(settings: PipelineSettings, store_urls: Sequence[str]) -> _StoreAccess:
    """Return the environment variables and mounts that a container needs to use the object stores in `store_urls`.

    The mounts are the files that these variables name, `store.ca_file` and `store.scratch`.
    """
    variables: dict[str, str] = {}
    for prefixes, usual_paths in [
        _STORE_CREDENTIALS.get(scheme, ((), {})) for scheme in {*map(get_store_scheme, store_urls)}
    ]:
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
    """Connect to the Docker daemon at `DOCKER_HOST`, or to the local daemon if this variable is not set. Return the client.

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
            "another daemon (users other than root must be in the group `docker`)"
        ) from error
    return client


@contextmanager
def _convert_docker_errors() -> Iterator[None]:
    """Convert exceptions of the Docker client into one-line errors. Use this function in a `with` statement.

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
    """Remove stopped containers that earlier runs left behind in this work folder.

    Raises:
        FailedError: A container of another run still uses the folder.
    """
    for container in client.containers.list(all=True, filters={"label": f"{_WORK_LABEL}={work_folder}"}):
        if container.status in ("running", "paused", "restarting"):
            raise FailedError(
                f"{work_folder}: container {container.name} of another run uses this work folder; "
                f"wait until it ends, or remove it: docker rm --force {container.name}"
            )
        container.remove(force=True, v=True)


def _pull_image_if_needed(client: DockerClient, image: str, images: ImageSettings, reporter: Reporter) -> None:
    """Pull an image from its registry if it is not on this machine, or if `images.pull_policy` is `Always`.

    Raises:
        InputError: The image is missing and may not be pulled, or pulling it fails.
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

# The Docker client yields the output of a container as pairs of bytes from standard output and from standard error. Each of
# the two may be None.
_OutputChunks = Iterable[tuple[bytes | None, bytes | None]]


class _ContainerStopper:
    """Stops the running container when this process receives SIGTERM or SIGINT.

    After the first signal the container has time to save a checkpoint. The second signal kills it.

    Attributes:
        container: The running container, or None between two containers.
        requests: The number of signals received so far.
    """

    def __init__(self) -> None:
        self.container: Container | None = None
        self.requests = 0

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop the running container after the first stop signal, and kill it after the second one."""
        self.requests += 1
        self.stop_container_if_requested()

    def stop_container_if_requested(self) -> None:
        """If a stop signal was received, start a thread that stops or kills the running container."""
        if self.requests and self.container is not None:
            # A signal handler interrupts the main thread, which may hold a lock of the Docker client. Calling the client
            # here could deadlock, so another thread calls it.
            threading.Thread(target=self._stop_or_kill, args=(self.container, self.requests > 1), daemon=True).start()

    def raise_if_requested(self) -> None:
        """Raise a `StoppedError` if a stop signal was received."""
        if self.requests:
            raise StoppedError("stopped on request; run the same command again to resume")

    @staticmethod
    def _stop_or_kill(container: Container, kill: bool) -> None:
        """Stop a container and wait until it has ended. If `kill` is set, kill it instead."""
        from docker.errors import APIError

        with suppress(APIError):  # raised if the container has already ended
            if kill:
                container.kill()
            else:
                # Docker answers the stop request only after the container has ended. The client must therefore wait longer
                # than the time that the container has to end.
                container.client.api.timeout = _ANSWER_SECONDS + _STOP_SECONDS
                container.stop(timeout=_STOP_SECONDS)


def _run_container(
    client: DockerClient, options: Mapping[str, Any], stopper: _ContainerStopper, reporter: Reporter, memory_setting: str
) -> list[str]:
    """Run a container until it ends, and return the lines of its standard output.

    Its standard error is shown while it runs. The container is removed at the end, also after an error.

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
        output_chunks = container.attach(stream=True, stdout=True, stderr=True, demux=True)
        container.start()
        stopper.container = container
        stopper.stop_container_if_requested()
        output = _read_container_output(output_chunks, reporter)
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
    """The standard output and the final error message of a container that has ended.

    Attributes:
        lines: The lines of standard output.
        error: The error message in the last line of standard error, or "" if that line is no error message.
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
                # Hold back each error message until another line follows. The caller raises an error with the last error
                # message of the container, so showing this message here would print it twice.
                held = line if line.startswith("error: ") else ""
                if not held:
                    reporter.say(line)
    return _ContainerOutput([*printed, *filter(None, rests[:1])], held.removeprefix("error: "))
