"""The command that starts the training processes of a pipeline.

One process without cards needs no launcher. Otherwise `mpirun` starts one process per card: inside the one worker, or by ssh
on several. Processes started by ssh inherit nothing from their container, so every variable that they need is named (`-x`),
and the ssh options are given whole, because what is given replaces what the MPI operator would set.
"""

from __future__ import annotations

from gaudi_bert.config import PipelineSettings

__all__ = ["EFA_SSH_PORT", "ROOT_SSH_PORT", "SSH_KEY", "USER_SSH_PORT", "training_command"]

ROOT_SSH_PORT = 22
# With the node's own network, port 22 is the node's.
EFA_SSH_PORT = 3022
# An sshd that is not root may listen here, and the key of its MPIJob is not where root's is looked for.
USER_SSH_PORT = 2222
SSH_KEY = "/etc/gaudi-bert-ssh/id_rsa"
# When a rank is lost, mpirun waits so long before it terminates the others, and again before it kills them.
LOST_RANK_SECONDS = 4
# mpirun's launcher: a run that is asked to stop has the time that it needs to save.
_STOPPING = ("-m", "gaudi_bert.runners.stop_ranks")
# What the vendor's image sets and its libraries read.
VENDOR_VARIABLES = (
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "GC_KERNEL_PATH",
    "HABANA_LOGS",
    "HABANA_PLUGINS_LIB_PATH",
    "HABANA_SCAL_BIN_PATH",
    "TF_MODULES_RELEASE_BUILD",
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

    Args:
        settings: `resources` says how many workers and cards there are; `kubernetes.network_interface` how they talk.
        stage_command: what each process runs.
        over_ssh: whether the processes are on other hosts than `mpirun`.
        variables: environment variables that the processes get from the launcher.
        ssh_port: where the workers' sshd listens.
        ssh_key: the file of the private key; None for the one that ssh takes by itself.
        python: the interpreter that has this package, where the command is run.
    """
    resources = settings.resources
    processes = resources.workers * resources.processes_per_worker
    if processes == 1 and not over_ssh:
        return stage_command
    program = f"{resources.mpi_prefix}/bin/mpirun" if resources.mpi_prefix else "mpirun"
    command = [python, *_STOPPING, program, "--allow-run-as-root", "--tag-output", "-np", str(processes)]
    command += ["--mca", "odls_base_sigkill_timeout", str(LOST_RANK_SECONDS)]
    if resources.cores_per_process:
        command += ["--bind-to", "core", "--map-by", f"socket:PE={resources.cores_per_process}"]
    else:
        command += ["--bind-to", "none"]
    if over_ssh:
        interface = settings.kubernetes.network_interface
        ssh = f"-p {ssh_port} -o ConnectionAttempts=10 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        ssh += f" -i {ssh_key}" if ssh_key is not None else ""
        command += ["--mca", "btl_tcp_if_include", interface, "--mca", "oob_tcp_if_include", interface]
        command += ["--mca", "plm_rsh_args", ssh]
        for name in ("PATH", *(VENDOR_VARIABLES if resources.cards else ()), *variables):
            command += ["-x", name]
    else:
        # Otherwise mpirun allows no more processes than the machine has cores.
        command += ["--host", f"localhost:{processes}"]
    return [*command, *stage_command]
