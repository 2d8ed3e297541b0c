"""The MPIJob's own commands, run for real as a user without rights: sshd on two hosts, and mpirun that starts ranks on them.

Hosts are network namespaces that this test makes and removes; nothing leaves them. The user has no name on this machine, so
that the ConfigMap's /etc/passwd is what names it, as in a pod.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.jobs import pod_specs
from gaudi_bert.runners.kubernetes.manifests import render
from gaudi_bert.runners.launch import USER_SSH_PORT

USER = 4711
SETTINGS = load_pipeline(None, ["resources.workers=2", f"kubernetes.user={USER}"])
PROGRAMS = ("/usr/sbin/sshd", "ssh", "ssh-keygen", "mpirun", "ip", "unshare", "setpriv")
_WITHOUT_RIGHTS = ("--clear-groups", "--no-new-privs", "--bounding-set=-all")
NETWORK = """set -e
ip netns add {0}l; ip netns add {0}1; ip netns add {0}2
ip -n {0}l link add eth0 type bridge; ip -n {0}l addr add 10.77.0.1/24 dev eth0
ip -n {0}l link set eth0 up; ip -n {0}l link set lo up
for n in 1 2; do
  ip -n {0}l link add port$n type veth peer name eth0 netns {0}$n
  ip -n {0}l link set port$n master eth0; ip -n {0}l link set port$n up
  ip -n {0}$n addr add 10.77.0.1$n/24 dev eth0; ip -n {0}$n link set eth0 up; ip -n {0}$n link set lo up
done
"""


class Hosts:
    """A launcher and two workers, each a network namespace with a name of its own."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix
        self.shared = {item["kind"]: item for item in render(SETTINGS).shared}
        self.launcher, self.worker = pod_specs(render(SETTINGS).steps["train"])
        (folder / "passwd").write_text(self.shared["ConfigMap"]["data"]["passwd"])
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", folder / "keys" / "id_rsa"], check=True)
        (folder / "keys" / "authorized_keys").write_bytes((folder / "keys" / "id_rsa.pub").read_bytes())
        for path in (folder / "keys").iterdir():
            path.chmod(0o644)  # as the secret of an MPIJob is mounted; its owner is root

    def command(self, host: str, command: list[str], **environment: str) -> list[str]:
        """`command` on a host, as the user, with no capability and no way to get one."""
        own = {"/tmp/ssh_host_key": f"{self.folder}/{host}/key", "/etc/gaudi-bert-ssh": f"{self.folder}/keys"}
        words = []
        for word in command:
            for place, here in own.items():
                word = word.replace(place, here)
            words.append(word)
        prepare = f'hostname {host} && mount --bind {self.folder}/passwd /etc/passwd && exec "$@"'
        on_host = ["ip", "netns", "exec", f"{self.prefix}{host[-1]}", "unshare", "--mount", "--uts"]
        as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", *_WITHOUT_RIGHTS]
        variables = [f"{name}={value}" for name, value in {"HOME": "/tmp", **environment}.items()]
        return [*on_host, "sh", "-c", prepare, "sh", *as_user, "env", *variables, *words]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"SSHD NOT TRIED: needs root, to make hosts, and {', '.join(PROGRAMS)}; not there: {missing}")
    prefix = f"gb{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="gaudi-bert-"))
    folder.chmod(0o755)
    for name in ("keys", "worker-1", "worker-2"):
        (folder / name).mkdir()
        os.chown(folder / name, *((0, 0) if name == "keys" else (USER, USER)))
    try:
        made = subprocess.run(["sh", "-c", NETWORK.format(prefix)], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"SSHD NOT TRIED: this machine lets nobody make network namespaces: {made.stderr.strip()}")
        yield Hosts(folder, prefix)
    finally:
        for host in "l12":
            subprocess.run(["ip", "netns", "del", f"{prefix}{host}"], capture_output=True, check=False)
        shutil.rmtree(folder)


def listens(log: Path) -> bool:
    return "Server listening" in log.read_text()


def test_ranks_are_started_on_two_hosts_without_root(hosts: Hosts) -> None:
    container: dict[str, Any] = hosts.worker["containers"][0]
    servers, logs = [], []
    try:
        for host in ("worker-1", "worker-2"):
            logs.append(hosts.folder / f"{host}.log")
            with logs[-1].open("w") as log:
                servers.append(subprocess.Popen(hosts.command(host, container["command"]), stderr=log, stdout=log))
        until = time.monotonic() + 60
        while not all(map(listens, logs)):
            assert all(server.poll() is None for server in servers), [log.read_text() for log in logs]
            assert time.monotonic() < until, [log.read_text() for log in logs]
            time.sleep(0.1)
        _check_ranks(hosts)
        _check_strangers(hosts)
    finally:
        for server in servers:
            server.terminate()
            server.wait(30)


def _check_ranks(hosts: Hosts) -> None:
    command: list[str] = hosts.launcher["containers"][0]["command"]
    rank = ["sh", "-c", "echo rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE: $(id -u) on $(hostname), HOME=$HOME"]
    started = [*command[command.index("mpirun") : command.index("gaudi-bert")], *rank]
    hostfile = hosts.folder / "hostfile"
    hostfile.write_text("10.77.0.11 slots=1\n10.77.0.12 slots=1\n")  # as the MPI operator gives it
    launched = hosts.command("launcher-l", started, OMPI_MCA_orte_default_hostfile=str(hostfile))
    done = subprocess.run(launched, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition(">:")[2] for line in done.stdout.splitlines())
    assert lines == [f"rank {number} of 2: {USER} on worker-{number + 1}, HOME=/tmp" for number in range(2)]


def _check_strangers(hosts: Hosts) -> None:
    """Without the job's key nobody is let in."""
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    ssh = ["ssh", "-p", str(USER_SSH_PORT), *options, "10.77.0.11", "true"]
    done = subprocess.run(hosts.command("launcher-l", ssh), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr
