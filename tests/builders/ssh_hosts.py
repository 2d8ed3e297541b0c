"""Hosts for the MPIJob's own commands: a launcher and two workers with sshd, as network namespaces of this machine.

Each has processes of its own, and nothing leaves them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.manifests import build_manifests
from gaudi_bert.runners.kubernetes.pods import iterate_pod_specs

USER = 4711
SETTINGS = load_pipeline(None, ["resources.workers=2", f"kubernetes.user={USER}"])
PROGRAMS = ("/usr/sbin/sshd", "ssh", "ssh-keygen", "mpirun", "ip", "unshare", "nsenter", "setpriv")
WORKERS = ("worker-1", "worker-2")
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
    """A launcher and two workers, each a network namespace with a name of its own, and processes of `USER` alone."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix
        (configuration,) = build_manifests(SETTINGS).list_objects_shared_by_steps("ConfigMap")
        self.launcher, self.worker = iterate_pod_specs(build_manifests(SETTINGS).steps["train"])
        (folder / "passwd").write_text(configuration["data"]["passwd"])
        (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.11 worker-1\n10.77.0.12 worker-2\n")
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
        names = f"mount --bind {self.folder}/hosts /etc/hosts"
        prepare = f'hostname {host} && {names} && mount --bind {self.folder}/passwd /etc/passwd && exec "$@"'
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        on_host = ["ip", "netns", "exec", f"{self.prefix}{host[-1]}", *namespaces]
        as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", *_WITHOUT_RIGHTS]
        variables = [f"{name}={value}" for name, value in {"HOME": "/tmp", **environment}.items()]
        return [*on_host, "sh", "-c", prepare, "sh", *as_user, "env", *variables, *words]

    @contextmanager
    def workers(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Both workers' containers, from when their sshd listens."""
        servers = []
        logs = [self.folder / f"{host}.log" for host in WORKERS]
        try:
            servers += [self.start_worker(host) for host in WORKERS]
            for path in logs:
                wait_until("Server listening", path, servers)
            yield servers
        finally:
            for server in servers:
                if server.poll() is None:  # its first process takes all others of its namespace along
                    os.kill(first_process(server), signal.SIGKILL)
                server.wait(30)

    def start_worker(self, host: str) -> subprocess.Popen[bytes]:
        """A worker's container; what it writes is added to the log of its host."""
        with (self.folder / f"{host}.log").open("a") as log:
            return subprocess.Popen(self.command(host, self.worker["containers"][0]["command"]), stderr=log, stdout=log)

    def stop_worker(self, server: subprocess.Popen[bytes], **environment: str) -> None:
        """As a kubelet stops a container: the hook, then SIGTERM to its first process."""
        process = first_process(server)
        enter = ["nsenter", "--target", str(process), "--mount", "--uts", "--net", "--pid"]
        hook: list[str] = self.worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        variables = [f"{name}={value}" for name, value in environment.items()]
        subprocess.run([*enter, "env", *variables, *hook], timeout=120, check=True)
        os.kill(process, signal.SIGTERM)

    def mpirun(self, rank: list[str]) -> list[str]:
        """The launcher's command, with `rank` in the position of the training."""
        command: list[str] = self.launcher["containers"][0]["command"]
        hostfile = self.folder / "hostfile"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in WORKERS))  # as the MPI operator gives it
        started = [*command[command.index("python3") : command.index("gaudi-bert")], *rank]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return self.command("launcher-l", started, OMPI_MCA_orte_default_hostfile=str(hostfile), PATH=path)


def wait_until(words: str, log: Path, processes: list[subprocess.Popen[bytes]], seconds: float = 120) -> None:
    """Wait for `words` in a log, while all `processes` run."""
    until = time.monotonic() + seconds
    while words not in log.read_text():
        assert all(process.poll() is None for process in processes), log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)


@contextmanager
def made_hosts() -> Iterator[Hosts]:
    """The hosts; skips loudly where they cannot be made."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"SSHD NOT TRIED: needs root, to make hosts, and {', '.join(PROGRAMS)}; not there: {missing}")
    prefix = f"gb{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="gaudi-bert-"))
    folder.chmod(0o755)
    for name in ("keys", *WORKERS):
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


def first_process(server: subprocess.Popen[bytes]) -> int:
    """The first process of a worker's container: what `unshare` started."""
    return int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()[0])
