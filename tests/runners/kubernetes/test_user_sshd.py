"""The MPIJob's own commands, run for real as a user without rights: sshd on two hosts, and mpirun that starts ranks on them.

The user has no name on this machine, so that the ConfigMap's /etc/passwd is what names it, as in a pod.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_bert.runners.launch import USER_SSH_PORT
from tests.builders.ssh_hosts import USER, WORKERS, Hosts, made_hosts, wait_until


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


# It saves when it is asked to, and is done when it is started the second time.
RANK = """
trap 'echo saved; exit 75' USR1 TERM
echo x >> {folder}/$(hostname)/starts
[ $(wc -l < {folder}/$(hostname)/starts) = 2 ] && echo done && exit 0
echo training on $(hostname)
while :; do sleep 0.1; done
"""


@pytest.mark.slow
def test_a_launcher_outlives_the_end_of_a_worker_and_waits_for_names_that_come_later() -> None:
    """A suspended MPIJob that is resumed, and then a drained node: the launcher that was started first ends well."""
    root = str(Path(__file__).resolve().parents[3])
    with made_hosts(USER) as hosts:
        names, log = (hosts.folder / "hosts").read_text(), hosts.folder / "launcher.log"
        (hosts.folder / "hosts").write_text("127.0.0.1 localhost\n")
        command = hosts.mpirun(["sh", "-c", RANK.format(folder=hosts.folder)], start="python3")
        with log.open("w") as output:
            environment = {**os.environ, "PYTHONPATH": root}
            launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        wait_until("waiting for 2 workers, at most 600 s: worker worker-1 does not answer", log, [launcher])
        (hosts.folder / "hosts").write_text(names)
        with hosts.workers() as servers:
            for host in WORKERS:
                wait_until(f"training on {host}", log, [*servers, launcher])
            hosts.stop_worker(servers[1], PYTHONPATH=root, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            servers[1].wait(30)
            wait_until("a worker was stopped, and its ranks have saved", log, [servers[0], launcher])
            servers.append(hosts.start_worker(WORKERS[1]))
            assert launcher.wait(120) == 0, log.read_text()
