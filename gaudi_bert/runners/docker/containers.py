"""The containers of a stage: what a pipeline file means in Docker's terms. Nothing here talks to Docker.

A container has what its stage needs and no more: a read-only root, no capabilities, no way to get more rights, the caller's
user. A stage with Gaudi cards runs as the vendor's software asks for: as root, by the runtime `habana`, with the host's IPC
and SYS_NICE. Requests for cores become shares, as on Kubernetes; a limit of memory is one.
"""

from __future__ import annotations

import glob
import ipaddress
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import in_store, scheme_of, shown_location
from gaudi_bert.common.launch import TORCH_PORT, torch_environment
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import PodResources, StoreSettings
from gaudi_bert.runners.launch import horovod_environment, training_command
from gaudi_bert.runners.stage_table import STAGES, named_paths, quantity_value, stage_engine, stage_image

# --- what a container sees of the host's disk: the work folder, the pipeline file, and read-only what that names
#
# Everything has the same path in the container as on the host, so that relative paths in the pipeline file, `--work` and the
# paths in messages mean the same inside and outside.

_Mount = dict[str, Any]

# Where an image has its own files: nothing of the host may lie over them.
_OF_THE_IMAGE = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var/lib"),
    *("/opt/venv", "/opt/gaudi-bert", "/opt/habanalabs", "/opt/amazon"),
)


def _bind_mount(path: Path, key: str, *, source: Path | None = None, read_only: bool = True) -> _Mount:
    """Show `path` (or `source` instead of it) at the same path in the container.

    `key` is the setting that named `path`, for the error; `path` must not hide files of the image.
    """
    target = PurePosixPath(os.path.abspath(path))
    for folder in map(PurePosixPath, _OF_THE_IMAGE):
        if target.is_relative_to(folder) or folder.is_relative_to(target):
            raise InputError(f"{key} = {target}: in a container, {folder} is the image's own; put it somewhere else")
    if target == PurePosixPath("/tmp"):
        raise InputError(f"{key} = /tmp: a container has its own /tmp; put it in a folder below")
    real = os.path.realpath(source if source is not None else path)
    return {"Type": "bind", "Source": real, "Target": str(target), "ReadOnly": read_only}


def _secret_mount(path: Path, target: str) -> _Mount:
    """Show a file or folder with log-ins or certificates, read-only, at a path that only containers have."""
    return {"Type": "bind", "Source": os.path.realpath(path), "Target": target, "ReadOnly": True}


def _input_mounts(settings: PipelineSettings, stage: str, pipeline_folder: Path) -> list[_Mount]:
    """Mounts of all that the pipeline file names and `stage` reads, but for what is in object stores."""
    mounts: dict[str, _Mount] = {}
    for key, text in named_paths(settings):
        if key in STAGES[stage].reads and not in_store(text):
            for path, source in _shown(key, text, pipeline_folder):
                mount = _bind_mount(path, key, source=source)
                mounts[mount["Target"]] = mount
    return [mount for target, mount in mounts.items() if not _is_inside_another(target, mounts)]


def _shown(key: str, text: str, pipeline_folder: Path) -> Iterator[tuple[Path, Path]]:
    """What has to be shown for a path, and what is shown there.

    That is the path itself; of a glob or of a checkpoint's prefix, the folder; and with records, their vocabulary.
    """
    is_checkpoint = key.endswith(".init_checkpoint")
    start = Path() if is_checkpoint else pipeline_folder
    path = Path(os.path.abspath(start / Path(text).expanduser()))
    if not path.exists() and glob.has_magic(text):
        path = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
    elif is_checkpoint and any(path.parent.glob(f"{glob.escape(path.name)}.*")):
        path = path.parent
    elif key == "finetune.init_checkpoint" and path.is_file():
        path = path.parent  # with its config and its tokenizer
    if not path.exists():
        raise InputError(f"{key} = {path}: no such file or folder; check the path")
    yield path, path
    folder = path if path.is_dir() else path.parent
    vocabulary = folder.resolve().parent / "vocab.txt"
    if key.endswith("records") and vocabulary.is_file():
        yield folder.parent / "vocab.txt", vocabulary


def _is_inside_another(target: str, mounts: dict[str, _Mount]) -> bool:
    """Whether the mount of a folder above shows it already."""
    path = PurePosixPath(target)
    for other, mount in mounts.items():
        if other != target and path.is_relative_to(other):
            below = os.path.join(mount["Source"], path.relative_to(other))
            return bool(os.path.realpath(below) == mounts[target]["Source"])
    return False


# --- object stores: log-ins, certificates, a network that reaches them, room on the disk
#
# Variables go to the daemon with the container, as `docker run --env NAME` sends them; files are shown read-only. Neither is
# written anywhere. Scratch is on the host's disk: a container's /tmp is memory.

_HOME = "/tmp"


class _StoreTools(NamedTuple):
    """What the tools of a store take from a machine.

    `prefixes` are those of the names of its variables, `files` those variables that name a file; its own tools keep log-ins
    in `folder`, below the home folder.
    """

    prefixes: tuple[str, ...]
    files: tuple[str, ...]
    folder: str


_AWS_FILES = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE", "AWS_WEB_IDENTITY_TOKEN_FILE")
_S3 = _StoreTools(("AWS_",), _AWS_FILES, ".aws")
_GCS = _StoreTools(("GOOGLE_", "CLOUDSDK_"), ("GOOGLE_APPLICATION_CREDENTIALS",), ".config/gcloud")
_AZURE = _StoreTools(("AZURE_",), ("AZURE_FEDERATED_TOKEN_FILE",), ".azure")
STORE_TOOLS: Mapping[str, _StoreTools] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}

# fsspec's own settings, for stores of every kind, and the way out of a network that has one.
_OF_ALL = ("FSSPEC_",)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def _store_variables(scheme: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What of `environment` the library for URLs of `scheme` reads."""
    prefixes = (*_OF_ALL, *(STORE_TOOLS[scheme].prefixes if scheme in STORE_TOOLS else ()))
    return {name: value for name, value in environment.items() if name.startswith(prefixes) or name.upper() in _PROXIES}


def _loopback_endpoint(settings: StoreSettings, environment: Mapping[str, str]) -> str | None:
    """The address of the S3 server, where that is this machine's own loopback."""
    url = settings.endpoint_url or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    host = urlsplit(url or "").hostname or ""
    try:
        return url if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return url if host == "localhost" or host.endswith(".localhost") else None


@dataclass(frozen=True)
class StoreAccess:
    """What a container gets besides; nothing, not even a mount, where its stage uses no store.

    The host's network is shared where the server listens there on loopback alone.
    """

    environment: dict[str, str] = field(default_factory=dict, repr=False)
    mounts: list[dict[str, Any]] = field(default_factory=list)
    host_network: bool = False


def store_urls(settings: PipelineSettings, work: Path, stage: str) -> list[str]:
    """The URLs that `stage` reads or writes."""
    named: list[str | Path] = [path for key, path in named_paths(settings) if key in STAGES[stage].reads]
    return [str(path) for path in [work, *named] if in_store(path)]


def _store_access(
    urls: Iterable[str], store: StoreSettings, scratch: Path, environment: Mapping[str, str], workers: int = 1
) -> StoreAccess:
    """What a container gets to use `urls`.

    `environment` is the caller's, `scratch` a folder of the host, `workers` how many containers work together.
    """
    schemes = {scheme_of(url) for url in urls}
    home = Path(environment.get("HOME", "/"))
    variables: dict[str, str] = {}
    mounts = [_bind_mount(scratch, "store.scratch", read_only=False)]
    for scheme in sorted(schemes):
        variables |= _store_variables(scheme, environment)
        tools = STORE_TOOLS.get(scheme)
        for name in tools.files if tools else ():
            if name in variables:
                variables[name] = _show_file(mounts, name, Path(variables[name]))
        if tools and (home / tools.folder).is_dir():
            mounts.append(_secret_mount(home / tools.folder, f"{_HOME}/{tools.folder}"))
    if store.ca_file:
        variables["AWS_CA_BUNDLE"] = _show_file(mounts, "store.ca_file", Path(store.ca_file))
    loopback = _loopback_endpoint(store, environment) if schemes & {"s3", "s3a"} else None
    if loopback and workers > 1:
        raise InputError(
            f"{loopback}: {workers} training containers have a network of their own, which does not reach this machine's "
            "loopback; name the server by another address of this machine, or set resources.workers to 1"
        )
    return StoreAccess(variables | {"TMPDIR": str(scratch)}, mounts, host_network=bool(loopback))


def _show_file(mounts: list[dict[str, Any]], name: str, path: Path) -> str:
    """Show a file that `name` names; its path in the container."""
    path = path.expanduser()
    if not path.is_file():
        raise InputError(f"{name} = {path}: no such file; check the path")
    target = f"/run/secrets/{name.lower().replace('.', '-')}"
    mounts[:] = [mount for mount in mounts if mount["Target"] != target]
    mounts.append(_secret_mount(path, target))
    return target


def portable_settings(settings: PipelineSettings) -> PipelineSettings:
    """The settings for containers: without paths of this machine, which variables name there."""
    paths = {"scratch", "ca_file"} & settings.store.model_fields_set
    if not paths:
        return settings
    store = settings.store.model_dump(exclude_unset=True, exclude=paths)
    return settings.model_copy(update={"store": StoreSettings.model_validate(store)})


# --- containers

Container = dict[str, Any]

# The work folder of a container, by which those of a killed run are recognised.
WORK_LABEL = "gaudi-bert.work"
_RENDEZVOUS_PORT = 29400
_CPU_SHARES_PER_CORE = 1024
_FEWEST_SHARES = 2


@dataclass(frozen=True)
class DockerRun:
    """One run of a pipeline in containers.

    `work` is the folder that holds the work folders of all pipelines, or its URL; relative paths in the `pipeline` file
    start at its folder. `user` is the `uid:gid` of stages without cards, `token` tells the containers of this run from
    others, `flags` are further options of `gaudi-bert run`. `scratch` goes when the run ends; `environment` is the
    caller's, of which stages that use an object store get what is about it.
    """

    settings: PipelineSettings
    work: Path
    pipeline: Path
    user: str
    token: str
    flags: tuple[str, ...] = ()
    scratch: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def parent(self) -> str:
        """The value of that label for `work`."""
        return shown_location(self.work) if in_store(self.work) else os.path.abspath(self.work)

    @property
    def root(self) -> Path:
        """The work folder of this pipeline."""
        return Path(self.parent) / self.settings.name

    @property
    def settings_file(self) -> Path:
        """The pipeline as it is run, with all that `--set` changed."""
        return self.scratch / "pipeline.yaml" if self.scratch is not None else self.root / ".pipeline-in-docker.yaml"

    @property
    def labels(self) -> dict[str, str]:
        """What all containers of this run carry."""
        return {WORK_LABEL: shown_location(self.root), "gaudi-bert.run": self.token}

    def access(self, stage: str) -> StoreAccess:
        """What the containers of a stage need for object stores."""
        urls = store_urls(self.settings, self.work, stage)
        if self.scratch is None or not urls:
            return StoreAccess()
        return _store_access(urls, self.settings.store, self.scratch / "files", self.environment, self.workers(stage))

    def workers(self, stage: str) -> int:
        """How many containers a stage has."""
        return self.settings.resources.workers if STAGES[stage].distributed else 1

    def needs_rendezvous(self, stage: str) -> bool:
        """Whether the containers of a stage may meet by Horovod, which takes a further container."""
        return self.workers(stage) > 1 and stage_engine(self.settings, STAGES[stage]) != "pytorch"

    def image(self, stage: str) -> str:
        """The image of a stage."""
        return stage_image(self.settings, STAGES[stage])

    def name(self, part: str) -> str:
        """The name of a container or network of this run."""
        return f"gaudi-bert-{self.settings.name}-{part}-{self.token}"


def stage_containers(run: DockerRun, stage: str) -> list[Container]:
    """The options of the containers of `stage`, as `docker.containers.create` takes them: one, or one per worker."""
    workers = run.workers(stage)
    if workers > 1 and run.settings.resources.cards:
        raise InputError(
            f"resources.workers = {workers} with cards: --on docker uses the cards of one server, as one worker; "
            "use --on kubernetes for several servers"
        )
    single = _single_container(run, stage)
    if workers == 1:
        return [single]
    return [_worker(run, stage, single, rank, workers) for rank in range(workers)]


def rendezvous_container(run: DockerRun) -> Container:
    """Where training workers find one another: a container that serves keys and values to their network."""
    return {
        **_confined(run.user),
        "image": run.image("train"),
        "name": run.name("rendezvous"),
        "labels": run.labels,
        "entrypoint": ["python3", "-m", "gaudi_bert.runners.launch", str(_RENDEZVOUS_PORT)],
        "environment": {"HOME": _HOME},
        "network": run.name("network"),
    }


def _single_container(run: DockerRun, stage: str) -> Container:
    settings = run.settings
    resources = settings.resources
    trains = STAGES[stage].trains
    on_cards = trains and resources.cards > 0
    access = run.access(stage)
    environment = {"HOME": _HOME, **access.environment}
    mounts = _input_mounts(settings, stage, run.pipeline.parent)
    mounts += [] if in_store(run.work) else [_bind_mount(run.root, "--work", read_only=False)]
    mounts.append(_bind_mount(run.pipeline, "PIPELINE", source=run.settings_file))
    if trains:
        environment |= resources.environment
    container = {
        **(_on_cards(settings) if on_cards else _confined(run.user)),
        **_limits(settings, resources.training if trains else resources.data, on_cards),
        "image": run.image(stage),
        "name": run.name(stage),
        "labels": {**run.labels, "gaudi-bert.stage": stage},
        "entrypoint": _command(run, stage, on_cards),
        "environment": (_card_environment(settings) | environment) if on_cards else environment,
        "mounts": [*mounts, *access.mounts],
        # Where a relative path on the command line starts.
        "working_dir": os.getcwd(),
    }
    if access.host_network:
        container["network_mode"] = "host"
    if trains and not on_cards:
        container["shm_size"] = int(quantity_value(resources.shared_memory))
    return container


def _command(run: DockerRun, stage: str, on_cards: bool) -> list[str]:
    command = ["gaudi-bert", "run", os.path.abspath(run.pipeline), "--work", run.parent]
    command += ["--stages", stage, *run.flags]
    if not STAGES[stage].trains and "--workers" not in run.flags:
        # Each process takes memory, and the container's is limited.
        command += ["--workers", str(run.settings.resources.data_processes)]
    # Ranks of PyTorch are started by `run` itself.
    together = on_cards and STAGES[stage].distributed and stage_engine(run.settings, STAGES[stage]) == "tensorflow"
    return training_command(run.settings, command, over_ssh=False) if together else command


def _confined(user: str) -> Container:
    return {
        "user": user,
        "read_only": True,
        "tmpfs": {"/tmp": "rw,nosuid,nodev,mode=1777"},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "init": True,
    }


def _on_cards(settings: PipelineSettings) -> Container:
    docker = settings.docker
    container: Container = {
        "user": "0:0",
        "runtime": docker.runtime,
        "ipc_mode": "host",
        "cap_add": ["SYS_NICE"],
        "init": True,
    }
    if docker.host_network:
        container["network_mode"] = "host"
    if docker.unlimited_memory_lock:
        container["ulimits"] = [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    return container


def _card_environment(settings: PipelineSettings) -> dict[str, str]:
    return {
        "HABANA_VISIBLE_DEVICES": settings.docker.visible_devices,
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        # Compiled graphs are shared by the processes of the container; each engine reads its own variables.
        "TF_RECIPE_CACHE_PATH": "/tmp/gaudi-bert-recipes",
        "PT_HPU_RECIPE_CACHE_CONFIG": "/tmp/gaudi-bert-recipes,false,4096,false",
        "PT_HPU_LAZY_MODE": "0",
    }


def _limits(settings: PipelineSettings, pod: PodResources, on_cards: bool) -> Container:
    """Memory as a limit; cores as shares, or with cards as a limit."""
    cores = quantity_value(pod.cpu)
    memory = int(quantity_value(pod.memory_limit or pod.memory))
    # Memory and swap together: a container at its limit is ended, not slowed down.
    limits: Container = {"mem_limit": memory, "memswap_limit": memory}
    most_cores = settings.docker.cpus or (cores if on_cards else None)
    if most_cores is not None:
        limits["nano_cpus"] = int(most_cores * 1e9)
    if not on_cards:
        limits["cpu_shares"] = max(int(cores * _CPU_SHARES_PER_CORE), _FEWEST_SHARES)
    return limits


def _worker(run: DockerRun, stage: str, single: Container, rank: int, workers: int) -> Container:
    """One of several training containers, which find one another by what a launcher would tell either engine."""
    name = run.name(f"{stage}-{rank}")
    rendezvous = (run.name("rendezvous"), _RENDEZVOUS_PORT)
    environment = torch_environment(rank, workers, per_host=1, address=run.name(f"{stage}-0"), port=TORCH_PORT)
    if run.needs_rendezvous(stage):
        environment |= horovod_environment(rank, workers, per_host=1, host=name, interface="eth0", rendezvous=rendezvous)
    return {
        **single,
        "name": name,
        "network": run.name("network"),
        "environment": environment | single["environment"],
    }
