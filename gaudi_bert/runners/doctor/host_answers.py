"""What a machine answers about its driver, cards, memory, container runtime and ports; nothing is judged here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["HostAnswers", "ask_host"]

COMMAND_SECONDS = 20


@dataclass(frozen=True)
class HostAnswers:
    """What the machine answered; an empty text is a command or file that is not there.

    Attributes:
        hl_smi: output of `hl-smi`.
        modules: output of `hl-smi -Q module_id,bus_id --format=csv`.
        device_nodes: names below /dev/accel, and /dev/hl* of old drivers.
        software: version of the vendor's TensorFlow bridge in this environment.
        meminfo: /proc/meminfo.
        numa_balancing: /proc/sys/kernel/numa_balancing.
        kernel: release of the kernel.
        memory_lock: most bytes a process may lock; -1 without limit.
        runtimes: output of `docker info --format '{{json .Runtimes}}'`.
        tcp: /proc/net/tcp.
        cores: physical cores; 0 where that is not known.
        environment: the variables that start with HABANA_.
    """

    hl_smi: str = ""
    modules: str = ""
    device_nodes: tuple[str, ...] = ()
    software: str = ""
    meminfo: str = ""
    numa_balancing: str = ""
    kernel: str = ""
    memory_lock: int = -1
    runtimes: str = ""
    tcp: str = ""
    cores: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def ask_host() -> HostAnswers:
    """Ask this machine."""
    try:
        software = importlib.metadata.version("habana-tensorflow")
    except importlib.metadata.PackageNotFoundError:
        software = ""
    nodes = [path.name for pattern in ("accel/accel*", "hl[0-9]*") for path in sorted(Path("/dev").glob(pattern))]
    return HostAnswers(
        hl_smi=_output("hl-smi"),
        modules=_output("hl-smi", "-Q", "module_id,bus_id", "--format=csv"),
        device_nodes=tuple(nodes),
        software=software,
        meminfo=_text("/proc/meminfo"),
        numa_balancing=_text("/proc/sys/kernel/numa_balancing"),
        kernel=platform.release(),
        memory_lock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        runtimes=_output("docker", "info", "--format", "{{json .Runtimes}}"),
        tcp=_text("/proc/net/tcp"),
        cores=len(set(re.findall(r"physical id\s*: (\d+)[\s\S]*?core id\s*: (\d+)", _text("/proc/cpuinfo")))),
        environment={name: value for name, value in os.environ.items() if name.startswith("HABANA_")},
    )


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
