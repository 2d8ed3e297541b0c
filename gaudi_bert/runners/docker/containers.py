"""The containers of a stage: what a pipeline file means in Docker's terms. Nothing here talks to Docker.

A container has what its stage needs and no more: a read-only root, no capabilities, no way to get more rights, the caller's
user. A stage with Gaudi cards runs as the vendor's software asks for: as root, by the runtime `habana`, with the host's IPC
and SYS_NICE. Requests for cores become shares, as on Kubernetes; a limit of memory is one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.store.location import in_store, shown_place
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import PipelineSettings, PodResources
from gaudi_bert.runners.docker.mounts import bind_mount, input_mounts
from gaudi_bert.runners.docker.store_access import HOME, StoreAccess, store_access, stored_places
from gaudi_bert.runners.images import stage_image
from gaudi_bert.runners.mpirun import training_command
from gaudi_bert.runners.pod_resources import quantity_value
from gaudi_bert.runners.stage_table import STAGES

__all__ = [
    "RENDEZVOUS_PORT",
    "WORK_LABEL",
    "DockerRun",
    "container_marks",
    "rendezvous_container",
    "stage_containers",
]

Container = dict[str, Any]

# Says which work folder a container works in, so that what a killed run left behind is found.
WORK_LABEL = "gaudi-bert.work"
RENDEZVOUS_PORT = 29400
_CPU_SHARES_PER_CORE = 1024
_FEWEST_SHARES = 2


@dataclass(frozen=True)
class DockerRun:
    """One run of a pipeline in containers.

    Args:
        settings: the pipeline.
        work: the folder that holds the work folders of all pipelines, or its URL.
        pipeline: the pipeline file; relative paths in it start at its folder.
        user: `uid:gid` of stages without cards.
        token: tells the containers of this run from others.
        flags: further options of `gaudi-bert run`, the same for all stages.
        scratch: a folder of this machine that goes when the run ends; for what lies in object stores.
        environment: the caller's, of which stages that use an object store get what is about it.
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
        """What containers are told of `work`."""
        return shown_place(self.work) if in_store(self.work) else os.path.abspath(self.work)

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
        return {WORK_LABEL: shown_place(self.root), "gaudi-bert.run": self.token}

    def access(self, stage: str) -> StoreAccess:
        """What the containers of a stage need for object stores."""
        places = stored_places(self.settings, self.work, stage)
        if self.scratch is None or not places:
            return StoreAccess()
        return store_access(places, self.settings.store, self.scratch / "files", self.environment, self.workers(stage))

    def workers(self, stage: str) -> int:
        """How many containers a stage has."""
        return self.settings.resources.workers if STAGES[stage].distributed else 1

    def image(self, stage: str) -> str:
        """The image of a stage."""
        return stage_image(self.settings.images, STAGES[stage])

    def name(self, part: str) -> str:
        """The name of a container or network of this run."""
        return f"gaudi-bert-{self.settings.name}-{part}-{self.token}"


def stage_containers(run: DockerRun, stage: str) -> list[Container]:
    """The options of the containers of `stage`, as `docker.containers.create` takes them: one, or one per training worker.

    Raises:
        InputError: a path of the pipeline cannot be shown in a container, or the workers do not fit on one machine.
    """
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
        "entrypoint": ["python3", "-m", "gaudi_bert.runners.rendezvous", str(RENDEZVOUS_PORT)],
        "environment": {"HOME": HOME},
        "network": run.name("network"),
    }


def _single_container(run: DockerRun, stage: str) -> Container:
    settings = run.settings
    resources = settings.resources
    trains = STAGES[stage].trains
    on_cards = trains and resources.cards > 0
    asked = resources.training if trains else resources.data
    access = run.access(stage)
    environment = {"HOME": HOME, **access.environment}
    if trains:
        environment |= resources.environment
    container = {
        **(_on_cards(settings) if on_cards else _confined(run.user)),
        **_limits(settings, asked, on_cards),
        "image": run.image(stage),
        "name": run.name(stage),
        "labels": {**run.labels, "gaudi-bert.stage": stage},
        "entrypoint": _command(run, stage, on_cards),
        "environment": (_card_environment(settings) | environment) if on_cards else environment,
        "mounts": [*_mounts(run, stage), *access.mounts],
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
    command += ["--stages", stage, "--json", *run.flags]
    if not STAGES[stage].trains and "--workers" not in run.flags:
        # Each process takes memory, and the container's is limited.
        command += ["--workers", str(run.settings.resources.data_processes)]
    together = on_cards and STAGES[stage].distributed
    return training_command(run.settings, command, over_ssh=False) if together else command


def _mounts(run: DockerRun, stage: str) -> list[dict[str, Any]]:
    work = [] if in_store(run.work) else [bind_mount(run.root, "--work", read_only=False)]
    return [
        *input_mounts(run.settings, stage, run.pipeline.parent),
        *work,
        bind_mount(run.pipeline, "PIPELINE", source=run.settings_file),
    ]


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
        # Compiled graphs are shared by the processes of the container.
        "TF_RECIPE_CACHE_PATH": "/tmp/gaudi-bert-recipes",
    }


def _limits(settings: PipelineSettings, asked: PodResources, on_cards: bool) -> Container:
    """Memory as a limit; cores as shares, or with cards as a limit."""
    cores = quantity_value(asked.cpu)
    memory = int(quantity_value(asked.memory_limit or asked.memory))
    # Memory and swap together: a container at its limit is ended, not slowed down.
    limits: Container = {"mem_limit": memory, "memswap_limit": memory}
    most_cores = settings.docker.cpus or (cores if on_cards else None)
    if most_cores is not None:
        limits["nano_cpus"] = int(most_cores * 1e9)
    if not on_cards:
        limits["cpu_shares"] = max(int(cores * _CPU_SHARES_PER_CORE), _FEWEST_SHARES)
    return limits


def _worker(run: DockerRun, stage: str, single: Container, rank: int, workers: int) -> Container:
    """One of several training containers: Horovod finds the others by what a launcher would tell it."""
    name = run.name(f"{stage}-{rank}")
    environment = {
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": workers,
        "HOROVOD_LOCAL_RANK": 0,
        "HOROVOD_LOCAL_SIZE": 1,
        "HOROVOD_CROSS_RANK": rank,
        "HOROVOD_CROSS_SIZE": workers,
        "HOROVOD_HOSTNAME": name,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "eth0",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": run.name("rendezvous"),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": RENDEZVOUS_PORT,
    }
    return {
        **single,
        "name": name,
        "network": run.name("network"),
        "environment": {**{key: str(value) for key, value in environment.items()}, **single["environment"]},
    }


def container_marks(containers: Sequence[Container]) -> list[str]:
    """How each container's lines are marked: not at all where there is one."""
    return [""] if len(containers) == 1 else [f"[worker {rank}] " for rank in range(len(containers))]
