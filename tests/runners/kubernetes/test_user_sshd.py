"""The MPIJob's own commands, run for real as a user without rights: sshd on two hosts, and mpirun that starts ranks on them.

The user has no name on this machine, so that the ConfigMap's /etc/passwd is what names it, as in a pod.
"""

from __future__ import annotations

import subprocess

from gaudi_bert.runners.launch import USER_SSH_PORT
from tests.builders.ssh_hosts import USER, Hosts, made_hosts


def test_ranks_are_started_on_two_hosts_without_root() -> None:
    with made_hosts(USER) as hosts, hosts.workers():
        rank = ["sh", "-c", "echo rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE: $(id -u) on $(hostname), HOME=$HOME"]
        done = subprocess.run(hosts.mpirun(rank), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        lines = sorted(line.partition(">:")[2] for line in done.stdout.splitlines())
        assert lines == [f"rank {number} of 2: {USER} on worker-{number + 1}, HOME=/tmp" for number in range(2)]
        _check_strangers(hosts)


def _check_strangers(hosts: Hosts) -> None:
    """Without the job's key nobody is let in."""
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    ssh = ["ssh", "-p", str(USER_SSH_PORT), *options, "10.77.0.11", "true"]
    done = subprocess.run(hosts.command("launcher-l", ssh), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr
