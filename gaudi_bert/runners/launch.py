"""Starts the training processes of a pipeline, which find each other by Horovod or PyTorch; passes on the request to stop.

Processes of PyTorch, and of TensorFlow on CPUs, are started by this process, with the variables of `torchrun` and
`horovodrun`; these programs themselves kill all processes before a checkpoint may be complete, and turn every exit code into
1 and a traceback. On cards or on several hosts `mpirun` starts those of TensorFlow.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.common.launch import (
    MASTER_ADDRESS,
    MASTER_PORT,
    ON_THIS_MACHINE,
    Node,
    find_node,
    free_port,
    handle_signals,
    torch_environment,
)
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import ResourceSettings
from gaudi_bert.config.sections import LoopSettings

# --- mpirun: one process per card, inside the one worker, or by ssh on several
#
# Processes started by ssh inherit nothing from their container, so every variable that they need is named (`-x`), and the
# ssh options are complete, because they replace what the MPI operator would set.

ROOT_SSH_PORT = 22
# With the node's own network, port 22 is the node's.
EFA_SSH_PORT = 3022
# An sshd that is not root may listen here, and the key of its MPIJob is not where root's is looked for.
USER_SSH_PORT = 2222
SSH_KEY = "/etc/gaudi-bert-ssh/id_rsa"
# When a rank is lost, mpirun waits so long before it terminates the others, and again before it kills them.
_LOST_RANK_SECONDS = 4
# mpirun's launcher: a run that must stop has time to save.
_STOPPING = ("-m", "gaudi_bert.runners.stop_ranks")
# What the vendor's image sets and its libraries read.
_VENDOR_VARIABLES = (
    *("PYTHONPATH", "LD_LIBRARY_PATH", "GC_KERNEL_PATH", "HABANA_LOGS"),
    *("HABANA_PLUGINS_LIB_PATH", "HABANA_SCAL_BIN_PATH", "TF_MODULES_RELEASE_BUILD", "LD_PRELOAD"),
)


def training_command(
    settings: PipelineSettings,
    stage_command: list[str],
    *,
    over_ssh: bool,
    variables: tuple[str, ...] = (),
    ssh_port: int = ROOT_SSH_PORT,
    ssh_key: str | None = None,
    python: str = "python3",
) -> list[str]:
    """`stage_command`, started once for each training process.

    With `over_ssh`, the processes are on other hosts than `mpirun` and get `variables` from the launcher; ssh takes a key
    by itself where `ssh_key` is None. `python` is the interpreter that has this package where the command is run.
    """
    resources = settings.resources
    processes = resources.workers * resources.processes_per_worker
    if processes == 1 and not over_ssh:
        return stage_command
    program = f"{resources.mpi_prefix}/bin/mpirun" if resources.mpi_prefix else "mpirun"
    command = [python, *_STOPPING, program, "--allow-run-as-root", "--tag-output", "-np", str(processes)]
    command += ["--mca", "odls_base_sigkill_timeout", str(_LOST_RANK_SECONDS)]
    if resources.cores_per_process:
        command += ["--bind-to", "core", "--map-by", f"socket:PE={resources.cores_per_process}"]
    else:
        command += ["--bind-to", "none"]
    if over_ssh:
        interface = settings.kubernetes.network_interface
        ssh = f"-p {ssh_port} -o ConnectionAttempts=10 -o LogLevel=ERROR -o StrictHostKeyChecking=no"
        ssh += " -o UserKnownHostsFile=/dev/null"
        ssh += f" -i {ssh_key}" if ssh_key is not None else ""
        command += ["--mca", "btl_tcp_if_include", interface, "--mca", "oob_tcp_if_include", interface]
        command += ["--mca", "plm_rsh_args", ssh]
        meeting = (MASTER_ADDRESS, MASTER_PORT)
        for name in ("PATH", *(_VENDOR_VARIABLES if resources.cards else ()), *meeting, *variables):
            command += ["-x", name]
    else:
        # Otherwise mpirun allows no more processes than the machine has cores.
        command += ["--host", f"localhost:{processes}"]
    return [*command, *stage_command]


def card_variables(recipes: str) -> dict[str, str]:
    """Return the variables of a container with cards; compiled graphs are kept in the folder `recipes`.

    Each engine reads its own variables (of PyTorch: the folder, whether to empty it, its size in MB, whether it is on NFS).
    """
    return {
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        "TF_RECIPE_CACHE_PATH": recipes,
        "PT_HPU_RECIPE_CACHE_CONFIG": f"{recipes},false,4096,false",
        "PT_HPU_LAZY_MODE": "0",
    }


# `--tag-output` puts job and rank before all that a process writes at once, so in the middle of a line, too.
RANK_TAG = re.compile(r"\[\d+,\d+\]<std(?:out|err)>: ?")


# --- Horovod's own launch, through Gloo


@contextmanager
def _horovod_environments(processes: int) -> Iterator[list[dict[str, str]]]:
    """Yield the variables of each process on this machine under `horovodrun --gloo`, while its server runs."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    slots = get_host_assignments(parse_hosts(f"localhost:{processes}"), processes)
    server.init(slots)
    shared = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }
    try:
        yield [shared | create_slot_env_vars(slot) for slot in slots]
    finally:
        server.stop()


# --- processes on this machine

# Long enough for the watchdog of the others to name who failed, and to end them.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.2
# Of a process: its id, its exit code (negative: the signal), and whether it was killed here, after others had failed.
_End = tuple[int, int, bool]


def run_training_processes(settings: PipelineSettings, stage: str, command: Sequence[str]) -> None:
    """Run `command` once for each training process of the pipeline, on this machine; their standard error is ours.

    `stage` is for messages: `train` or `finetune`. The standard output of `command` is dropped.
    """
    processes = settings.resources.workers * settings.resources.processes_per_worker
    node = find_node()
    engine = _section(settings, stage).engine
    is_tensorflow = engine == "tensorflow" or (engine == "auto" and find_spec("horovod") is not None)
    if node is None and settings.resources.cards and is_tensorflow:
        command = training_command(settings, list(command), over_ssh=False, python=sys.executable)
        _check_ends(stage, _run_all([command], [dict(os.environ)]), ["mpirun"])
        return
    cores = _cores_of_processes(settings.resources, node.processes if node is not None else processes)
    with _environments(node, settings, stage, processes) as own:
        ends = _run_all([command] * len(own), [os.environ | variables for variables in own], cores)
    first, size = (node.rank * node.processes, node.count * node.processes) if node is not None else (0, processes)
    _check_ends(stage, ends, [f"rank {first + number} of {size}" for number in range(len(own))])


def _section(settings: PipelineSettings, stage: str) -> LoopSettings:
    return settings.finetune if stage == "finetune" else settings.training


def _cores_of_processes(resources: ResourceSettings, processes: int) -> list[set[int]] | None:
    """The cores of each process, with all threads of each; None where the pipeline binds none."""
    count = resources.cores_per_process
    if count is None:
        return None
    allowed = os.sched_getaffinity(0)
    cores = set()
    for number in allowed:
        try:
            text = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii")
        except OSError:
            text = str(number)
        ranges = [part.partition("-") for part in text.strip().split(",")]
        siblings = {each for first, _, last in ranges for each in range(int(first), int(last or first) + 1)}
        cores.add(tuple(sorted(siblings & allowed)))
    threads = sorted(cores)
    if processes * count > len(threads):
        raise InputError(
            f"resources.cores_per_process = {count}: {processes} processes need {processes * count} cores, and there are "
            f"{len(threads)}; lower it, or leave it out"
        )
    return [
        {each for core in threads[start : start + count] for each in core} for start in range(0, processes * count, count)
    ]


@contextmanager
def _environments(
    node: Node | None, settings: PipelineSettings, stage: str, processes: int
) -> Iterator[list[dict[str, str]]]:
    """The variables of each process here: those of a node; of the engine, or of both where a process chooses it."""
    if node is not None:
        yield [node.torch_variables(local_rank) for local_rank in range(node.processes)]
        return
    section = _section(settings, stage)
    has_horovod, ranks = find_spec("horovod") is not None, range(processes)
    if not has_horovod and (section.engine == "tensorflow" or (section.engine == "auto" and find_spec("torch") is None)):
        raise InputError(
            f"resources.workers: {processes} processes need Horovod, which is not installed; run `make setup-horovod`, "
            f"or set {section.section_name}.engine to pytorch, or resources.workers to 1"
        )
    own: list[dict[str, str]] = [{} for _ in ranks]
    if section.engine != "tensorflow":
        port = free_port()
        own = [
            torch_environment(rank, processes, per_host=processes, address="127.0.0.1", port=port) | ON_THIS_MACHINE
            for rank in ranks
        ]
    if section.engine == "pytorch" or not has_horovod:
        yield own
        return
    with _horovod_environments(processes) as horovod:
        yield [torch | variables for torch, variables in zip(own, horovod, strict=True)]


def _check_ends(stage: str, ends: Sequence[_End], names: Sequence[str]) -> None:
    # The process with wrong input reports what is wrong, and the others end because of it; a run is stopped if all are.
    wrong, stopped = InputError.exit_code, StoppedError.exit_code
    codes = [code for _, code, _ in ends]
    failed = min((each for each in codes if each > 0), default=0, key=lambda each: (each != wrong, each == stopped))
    if failed == stopped:
        raise StoppedError(f"{stage}: stopped on request; run it again to resume")
    # A process that is killed can say nothing, so this one does.
    killed = [
        f"{name} (process {process}) was killed by {signal.Signals(-code).name}"
        for name, (process, code, killed_by_us) in zip(names, ends, strict=True)
        if code < 0 and not killed_by_us
    ]
    if failed:
        message = f"{stage}: one of {len(ends)} processes ended with exit code {failed}; see its error above"
        raise (InputError if failed == wrong else FailedError)("; ".join([message, *killed]))
    if killed:
        why = "see its error above"
        if -signal.SIGKILL in codes:
            why = "unless you killed it, it ran out of memory (see dmesg)"
        raise FailedError(f"{stage}: {'; '.join(killed)}; {why}; run it again to resume from the last checkpoint")
    if any(codes):
        raise FailedError(f"{stage}: a process did not end after the others had, and was killed; run it again to resume")


def _run_all(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    cores: Sequence[set[int]] | None = None,
) -> list[_End]:
    """Run all, each on its `cores`, until they end; after a failure, the others have `_GRACE_SECONDS` to say why."""
    running: list[subprocess.Popen[bytes]] = []
    with _forwarded_signals(running):
        for command, environment in zip(commands, environments, strict=True):
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True))
        for process, own in zip(running, cores or (), strict=cores is not None):
            os.sched_setaffinity(process.pid, own)
        deadline, killed = float("inf"), set()
        while None in (codes := [process.poll() for process in running]):
            if deadline == float("inf") and any(codes):
                deadline = time.monotonic() + _GRACE_SECONDS
            if time.monotonic() > deadline:
                killed |= {process.pid for process in running if process.poll() is None}
                for process in running:
                    process.kill()
            time.sleep(_POLL_SECONDS)
    return [(process.pid, process.wait(), process.pid in killed) for process in running]


@contextmanager
def _forwarded_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """While the context lasts, SIGTERM and Ctrl-C go to `processes`, which save and stop; this process waits for them."""

    def forward(number: int, frame: FrameType | None) -> None:
        os.write(2, b"stopping: the training processes save and end\n")  # `print` may be interrupted by the next signal
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    with handle_signals((signal.SIGTERM, signal.SIGINT), forward):
        yield
