"""Start the training processes of a pipeline and forward stop signals to them.

This process itself starts PyTorch processes, and TensorFlow processes on CPUs. It sets the environment variables that
`torchrun` or `horovodrun` would set. These two programs are not used, because they kill all processes before a checkpoint is
complete, and because they replace every exit code by 1 and a traceback. TensorFlow processes on Gaudi cards or on several
hosts are started by `mpirun`.

`run_training_processes` starts the processes on this machine. `build_training_command` only builds a command line.
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
from typing import NamedTuple

from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.common.launch import (
    MASTER_ADDRESS,
    MASTER_PORT,
    ON_THIS_MACHINE,
    TrainingNode,
    detect_training_node,
    find_free_port,
    handle_signals,
    torch_environment,
)
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.places import ResourceSettings
from gaudi_bert.config.sections import LoopSettings

# --- mpirun: one process per card, on a single worker or over ssh on several workers
#
# Processes that are started over ssh do not inherit the environment of their container, so the option `-x` of mpirun must
# forward every variable that they need. The ssh options below replace those of the MPI operator, so they must be complete.

ROOT_SSH_PORT = 22
# Pods that use EFA are on the host network, where the host's own sshd already uses port 22.
EFA_SSH_PORT = 3022
# An sshd that does not run as root cannot listen on a port below 1024.
USER_SSH_PORT = 2222
# ssh finds its key by default only if it runs as root, so an MPIJob that runs as another user passes this path to ssh.
SSH_KEY = "/etc/gaudi-bert-ssh/id_rsa"
# After a rank has failed, mpirun waits this long before it sends SIGTERM to the other ranks, and again before it kills them.
_LOST_RANK_SECONDS = 4
# mpirun kills its ranks soon after a stop signal, before they can save. So this module starts mpirun and handles the stop
# signals.
_STOP_RANKS_MODULE = ("-m", "gaudi_bert.runners.stop_ranks")
# The vendor's image sets these environment variables, and the vendor's libraries read them.
_VENDOR_VARIABLES = (
    *("PYTHONPATH", "LD_LIBRARY_PATH", "GC_KERNEL_PATH", "HABANA_LOGS"),
    *("HABANA_PLUGINS_LIB_PATH", "HABANA_SCAL_BIN_PATH", "TF_MODULES_RELEASE_BUILD", "LD_PRELOAD"),
)


def build_training_command(
    settings: PipelineSettings,
    stage_command: list[str],
    *,
    over_ssh: bool,
    forwarded_variables: tuple[str, ...] = (),
    ssh_port: int = ROOT_SSH_PORT,
    ssh_key: str | None = None,
    python_program: str = "python3",
) -> list[str]:
    """Return an `mpirun` command line that starts all training processes of a stage.

    If there is only one process and it runs on this host, return `stage_command` unchanged.

    Args:
        settings: The settings of the pipeline.
        stage_command: The command line of one training process.
        over_ssh: Whether `mpirun` starts the processes on other hosts over ssh.
        forwarded_variables: Names of environment variables that are forwarded to other hosts, or patterns such as `AWS_*`.
        ssh_port: The port of the sshd on the other hosts.
        ssh_key: The private key file for ssh. If it is None, ssh uses its default key.
        python_program: The Python interpreter that has this package installed on the host that runs the command.
    """
    resources = settings.resources
    processes = resources.workers * resources.processes_per_worker
    if processes == 1 and not over_ssh:
        return stage_command
    program = f"{resources.mpi_prefix}/bin/mpirun" if resources.mpi_prefix else "mpirun"
    command = [python_program, *_STOP_RANKS_MODULE, program, "--allow-run-as-root", "--tag-output", "-np", str(processes)]
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
        vendor_variables = _VENDOR_VARIABLES if resources.cards else ()
        for name in ("PATH", *vendor_variables, MASTER_ADDRESS, MASTER_PORT, *forwarded_variables):
            command += ["-x", name]
    else:
        # By default, mpirun refuses to start more processes than the machine has cores. This option allows more processes.
        command += ["--host", f"localhost:{processes}"]
    return [*command, *stage_command]


def build_accelerator_environment(compiled_graph_folder: str) -> dict[str, str]:
    """Return the environment variables that processes on Gaudi accelerators need, by name.

    Args:
        compiled_graph_folder: The folder where TensorFlow and PyTorch cache compiled graphs, which the vendor calls recipes.
    """
    return {
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        "TF_RECIPE_CACHE_PATH": compiled_graph_folder,
        # The fields are the folder, whether to empty it at the start, its maximum size in MB, and whether it is on NFS.
        "PT_HPU_RECIPE_CACHE_CONFIG": f"{compiled_graph_folder},false,4096,false",
        "PT_HPU_LAZY_MODE": "0",
    }


# With `--tag-output`, mpirun puts such a tag before each chunk of output that a process writes. A chunk may begin in the
# middle of a line, so this pattern is not anchored to the start of a line.
RANK_TAG = re.compile(r"\[\d+,\d+\]<std(?:out|err)>: ?")


# --- Horovod over Gloo, on this machine

# The environment variables of one training process, by name.
_Environment = dict[str, str]


@contextmanager
def _start_horovod_rendezvous(process_count: int) -> Iterator[list[_Environment]]:
    """Start Horovod's rendezvous server, and yield the environment variables of each training process.

    The variables are the same that `horovodrun --gloo` would set. The server stops at the end of the `with` block.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    slots = get_host_assignments(parse_hosts(f"localhost:{process_count}"), process_count)
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

# After one process has failed, the others have this time to notice the failure, report it and end. Then they are killed.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.2


class _ProcessExit(NamedTuple):
    """Describes how a training process ended.

    Attributes:
        process_id: The id of the process.
        code: The exit code, or the negative number of the signal that ended the process.
        killed_by_us: Whether this process killed it because another process had failed.
    """

    process_id: int
    code: int
    killed_by_us: bool


def run_training_processes(settings: PipelineSettings, stage: str, command: Sequence[str]) -> None:
    """Run a command once per training process on this machine, and wait until all processes have ended.

    The processes share the standard error of this process. Their standard output is discarded.

    Args:
        settings: The settings of the pipeline.
        stage: `train` or `finetune`, which selects the settings section with the engine.
        command: The command line of one training process.

    Raises:
        InputError: A process reported wrong input, Horovod is missing, or there are too few cores.
        FailedError: A process failed or was killed.
        StoppedError: The run was stopped by a signal.
    """
    process_count = settings.resources.workers * settings.resources.processes_per_worker
    node = detect_training_node()
    engine = _select_training_settings(settings, stage).engine
    is_tensorflow = engine == "tensorflow" or (engine == "auto" and find_spec("horovod") is not None)
    if node is None and settings.resources.cards and is_tensorflow:
        command = build_training_command(settings, list(command), over_ssh=False, python_program=sys.executable)
        _raise_if_any_failed(stage, _run_processes([command], [dict(os.environ)]), ["mpirun"])
        return
    cores = _assign_cores(settings.resources, node.processes if node is not None else process_count)
    with _prepare_rendezvous(node, settings, stage, process_count) as environments:
        exits = _run_processes([command] * len(environments), [os.environ | variables for variables in environments], cores)
    first, size = (node.rank * node.processes, node.count * node.processes) if node is not None else (0, process_count)
    _raise_if_any_failed(stage, exits, [f"rank {first + number} of {size}" for number in range(len(environments))])


def _select_training_settings(settings: PipelineSettings, stage: str) -> LoopSettings:
    """Return the settings section that applies to a training stage, which is `train` or `finetune`."""
    return settings.finetune if stage == "finetune" else settings.training


def _assign_cores(resources: ResourceSettings, process_count: int) -> list[set[int]] | None:
    """Return the CPU numbers that each process may use, or None if `resources.cores_per_process` is not set.

    Each process may use `cores_per_process` physical cores and all hardware threads of these cores. Only CPUs that this
    process itself may use are assigned.

    Raises:
        InputError: There are fewer cores than the processes need.
    """
    cores_per_process = resources.cores_per_process
    if cores_per_process is None:
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
    needed = process_count * cores_per_process
    if needed > len(threads):
        raise InputError(
            f"resources.cores_per_process = {cores_per_process}: {process_count} processes need {needed} cores, but this "
            f"process may use only {len(threads)}; lower the value, or omit the setting"
        )
    return [
        {number for core in threads[start : start + cores_per_process] for number in core}
        for start in range(0, needed, cores_per_process)
    ]


@contextmanager
def _prepare_rendezvous(
    node: TrainingNode | None, settings: PipelineSettings, stage: str, process_count: int
) -> Iterator[list[_Environment]]:
    """Yield the environment variables that let each training process on this machine connect to the others.

    A node of a multi-node run uses only PyTorch's variables. On a single machine, the variables are those of the engine. If
    the engine is `auto` and Horovod is installed, each process gets the variables of both engines, because the process
    itself chooses the engine.

    Raises:
        InputError: TensorFlow would need Horovod, which is not installed.
    """
    if node is not None:
        yield [node.torch_variables(local_rank) for local_rank in range(node.processes)]
        return
    section = _select_training_settings(settings, stage)
    has_horovod, ranks = find_spec("horovod") is not None, range(process_count)
    if not has_horovod and (section.engine == "tensorflow" or (section.engine == "auto" and find_spec("torch") is None)):
        raise InputError(
            f"resources.workers: {process_count} TensorFlow processes need Horovod, which is not installed; run "
            f"`make setup-horovod`, or set {section.section_name}.engine to pytorch, or resources.workers to 1"
        )
    environments: list[dict[str, str]] = [{} for _ in ranks]
    if section.engine != "tensorflow":
        port = find_free_port()
        environments = [
            torch_environment(rank, process_count, processes_per_host=process_count, address="127.0.0.1", port=port)
            | ON_THIS_MACHINE
            for rank in ranks
        ]
    if section.engine == "pytorch" or not has_horovod:
        yield environments
        return
    with _start_horovod_rendezvous(process_count) as horovod:
        yield [torch | variables for torch, variables in zip(environments, horovod, strict=True)]


def _raise_if_any_failed(stage: str, exits: Sequence[_ProcessExit], process_names: Sequence[str]) -> None:
    """Raise an error that summarizes how the training processes ended, if any of them did not succeed.

    Args:
        stage: The name of the stage, for messages.
        exits: How each process ended.
        process_names: The name of each process, for messages.

    Raises:
        InputError: A process reported wrong input.
        FailedError: A process failed or was killed.
        StoppedError: Every process that did not succeed was stopped on request.
    """
    # If one process reports wrong input, the others fail only as a consequence, so report the wrong input. If some processes
    # failed and others were stopped, report the failure.
    wrong, stopped = InputError.exit_code, StoppedError.exit_code
    codes = [each.code for each in exits]
    failed = min((each for each in codes if each > 0), default=0, key=lambda each: (each != wrong, each == stopped))
    if failed == stopped:
        raise StoppedError(f"{stage}: stopped on request; run the same command again to resume")
    # A process that was killed by a signal could not print an error message, so report the process and the signal here.
    killed = [
        f"{name} (process {each.process_id}) was killed by {signal.Signals(-each.code).name}"
        for name, each in zip(process_names, exits, strict=True)
        if each.code < 0 and not each.killed_by_us
    ]
    if failed:
        failure = f"{stage}: one of {len(exits)} processes ended with exit code {failed}; see its error above"
        raise (InputError if failed == wrong else FailedError)("; ".join([failure, *killed]))
    if killed:
        why = "see its error above"
        if -signal.SIGKILL in codes:
            why = "unless you killed it, it probably ran out of memory (see dmesg)"
        raise FailedError(
            f"{stage}: {'; '.join(killed)}; {why}; run the same command again to resume from the last checkpoint"
        )
    if any(codes):
        raise FailedError(
            f"{stage}: a process was killed because it did not end after the others; run the same command again to resume"
        )


def _run_processes(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    cores_by_process: Sequence[set[int]] | None = None,
) -> list[_ProcessExit]:
    """Start one process per command, wait until all of them have ended, and return how each process ended.

    After the first failure, the other processes have 10 seconds to end by themselves before they are killed.

    Args:
        commands: The command line of each process.
        environments: The environment variables of each process.
        cores_by_process: The CPU numbers that each process is bound to, or None to bind none.
    """
    running: list[subprocess.Popen[bytes]] = []
    with _forward_stop_signals(running):
        for command, environment in zip(commands, environments, strict=True):
            running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True))
        for process, own in zip(running, cores_by_process or (), strict=cores_by_process is not None):
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
    return [_ProcessExit(process.pid, process.wait(), process.pid in killed) for process in running]


@contextmanager
def _forward_stop_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Forward SIGTERM and Ctrl-C to `processes` as SIGTERM, so that the processes save a checkpoint and stop.

    This applies during the `with` block. This process itself is not interrupted. Processes may be added to the list later.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        """Print a message and send SIGTERM to all processes that are still running."""
        # A second signal may interrupt this handler, and calling `print` again inside `print` is not safe. So use
        # `os.write`.
        os.write(2, b"stopping: the training processes save and end\n")
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    with handle_signals((signal.SIGTERM, signal.SIGINT), forward):
        yield
