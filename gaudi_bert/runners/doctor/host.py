"""What a machine answers about its driver, cards, memory, container runtime and ports; what that means for a pipeline."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gaudi_bert.common.errors import has_tensorflow, install_command
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning
from gaudi_bert.runners.launch import EFA_SSH_PORT
from gaudi_bert.runners.resources import quantity_value

_COMMAND_SECONDS = 20


@dataclass(frozen=True)
class HostAnswers:
    """What the machine answered; an empty text is a command or file that does not exist.

    `modules` is the output of `hl-smi -Q`, `runtimes` that of `docker info`; `device_nodes` are the names below /dev/accel
    and the /dev/hl* of old drivers, `software` is the version of the vendor's TensorFlow bridge. `memory_lock` is in bytes,
    -1 without limit; `cores` are physical ones, 0 where that is not known; `environment` holds the variables that start
    with HABANA_. `python` is that of this process, `tensorflow` and `pytorch` the versions that are
    installed there (PyTorch counts only with transformers).
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
    python: tuple[int, int] = (3, 11)
    tensorflow: str = ""
    pytorch: str = ""


def ask_host() -> HostAnswers:
    """Ask this machine."""
    software = _installed("habana-tensorflow")
    nodes = [path.name for pattern in ("accel/accel*", "hl[0-9]*") for path in sorted(Path("/dev").glob(pattern))]
    return HostAnswers(
        hl_smi=_output("hl-smi"),
        modules=_output("hl-smi", "-Q", "module_id,bus_id", "--format=csv"),
        device_nodes=tuple(nodes),
        software=software,
        meminfo=_content("/proc/meminfo"),
        numa_balancing=_content("/proc/sys/kernel/numa_balancing"),
        kernel=platform.release(),
        memory_lock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        runtimes=_output("docker", "info", "--format", "{{json .Runtimes}}"),
        tcp=_content("/proc/net/tcp"),
        cores=len(set(re.findall(r"physical id\s*: (\d+)[\s\S]*?core id\s*: (\d+)", _content("/proc/cpuinfo")))),
        environment={name: value for name, value in os.environ.items() if name.startswith("HABANA_")},
        python=sys.version_info[:2],
        tensorflow=_installed("tensorflow-cpu") or _installed("tensorflow"),
        pytorch=_installed("torch") if _installed("transformers") else "",
    )


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


# --- checks: what the vendor's documentation asks for (Gaudi software 1.14.0, the last with TensorFlow)

_SOFTWARE = "1.14.0"
_LISTENING = "0A"
_PAGE_BYTES = 2 * 2**20


def examine_host(settings: PipelineSettings) -> list[CheckResult]:
    """The results of all checks of this machine, for training with `settings`."""
    return check_host(ask_host(), settings)


def check_host(answers: HostAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One result per check, in an order in which fixing makes sense; without any cards, only what matters there."""
    if not settings.resources.cards and not answers.device_nodes:
        cards = passed("cards", "none here, and the pipeline asks for none")
        return [_commands(answers), cards, _runtime(answers, settings)]
    return [check(answers, settings) for check in _CHECKS]


def _commands(answers: HostAnswers) -> CheckResult:
    """Which commands run here: training needs TensorFlow; `embed` and `predict` take PyTorch where there is none."""
    python, torch = ".".join(map(str, answers.python)), install_command("pytorch")
    if answers.tensorflow.startswith("2.15."):
        encoders = "any encoder" if answers.pytorch else f"a BERT (for other encoders: {torch})"
        runs = f"everything runs here, embed and predict with {encoders}"
        return passed("commands", f"Python {python}, TensorFlow {answers.tensorflow}: {runs}")
    if answers.tensorflow:
        remedy = install_command("tensorflow")
        return warning("commands", f"TensorFlow is {answers.tensorflow}, and 2.15 is needed", remedy)
    data = "estimate, pack, verify, import"
    rest, remedy = (
        (f"{data}, embed and predict (by PyTorch) run here; train, evaluate and finetune do not", "")
        if answers.pytorch
        else (f"{data} run here; train, evaluate, finetune, embed and predict do not", f"; for embed and predict: {torch}")
    )
    if not has_tensorflow(answers.python):
        remedy = f"to train: {install_command('tensorflow')}, or use --on docker{remedy}"
        return warning("commands", f"TensorFlow 2.15 has no version for Python {python}: {rest}", remedy)
    remedy = f"to train: {install_command('tensorflow')}, or use --on docker{remedy}"
    return warning("commands", f"TensorFlow is not installed: {rest}", remedy)


def _driver(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    match = re.search(r"Driver Version:\s*(\d+\.\d+\.\d+)", answers.hl_smi)
    if match is None:
        return failed(
            "driver", "hl-smi is missing or does not answer", f"install the Gaudi driver {_SOFTWARE} (habanalabs-dkms)"
        )
    version, image = match[1], answers.software[: len(_SOFTWARE)] or _SOFTWARE
    if version != image:
        remedy = f"install driver {image} on the host, or use an image of software {version}"
        return failed("driver", f"driver {version}, but software {image} in the image", remedy)
    return passed("driver", f"driver and image are both {version}")


def _cards(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    cards, nodes = settings.resources.cards, len(answers.device_nodes)
    if nodes < cards:
        remedy = f"load the driver (modprobe habanalabs), give the container its devices, or set resources.cards to {nodes}"
        return failed("cards", f"{nodes} device nodes, the pipeline asks for {cards} cards", remedy)
    return passed("cards", f"{nodes} device nodes, the pipeline asks for {cards}")


def _modules(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    modules = re.findall(r"^\s*(\d+)\s*,", answers.modules, re.MULTILINE)
    if not modules:
        return warning("module ids", "hl-smi lists none", "see `hl-smi -Q module_id,bus_id --format=csv`")
    if len(set(modules)) != len(modules):
        return failed("module ids", f"{', '.join(modules)}: some are twice", "reset the cards or reboot the server")
    visible = answers.environment.get("HABANA_VISIBLE_MODULES")
    if visible and len(visible.split(",")) != settings.resources.cards:
        remedy = "set resources.cards to their number, or unset the variable"
        return failed("module ids", f"HABANA_VISIBLE_MODULES={visible}, {settings.resources.cards} cards requested", remedy)
    return passed("module ids", ", ".join(sorted(modules, key=int)))


def _hugepages(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    total, free = (_meminfo(answers, f"HugePages_{kind}") for kind in ("Total", "Free"))
    size = _meminfo(answers, "Hugepagesize") * 1024
    pages = int(-(-quantity_value(settings.resources.hugepages_2Mi) // _PAGE_BYTES))
    if size not in (0, _PAGE_BYTES):
        return failed("huge pages", f"the page size is {size // 1024} kB", "boot with default_hugepagesz=2M")
    if free < pages:
        return failed(
            "huge pages", f"{free} of {total} free, {pages} requested", f"sysctl -w vm.nr_hugepages={total - free + pages}"
        )
    if not total:
        return warning("huge pages", "none reserved", "the vendor asks for them: 95000 MiB for 8 Gaudi2 cards")
    return passed("huge pages", f"{free} of {total} free, {pages} requested")


def _meminfo(answers: HostAnswers, key: str) -> int:
    match = re.search(rf"^{key}:\s*(\d+)", answers.meminfo, re.MULTILINE)
    return int(match[1]) if match else 0


def _memory_lock(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.memory_lock == -1:
        return passed("memory lock", "unlimited")
    limit = f"at most {answers.memory_lock // 1024} kB"
    return failed("memory lock", limit, "ulimit -l unlimited (docker run --ulimit memlock=-1:-1)")


def _numa(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    version = tuple(int(part) for part in re.findall(r"\d+", answers.kernel)[:2])
    if answers.numa_balancing.strip() in ("", "0"):
        return passed("NUMA balancing", "off")
    if (5, 9) <= version <= (5, 16):
        remedy = "sysctl -w kernel.numa_balancing=0"
        return failed("NUMA balancing", f"on, which kernels 5.9 to 5.16 do badly ({answers.kernel})", remedy)
    return passed("NUMA balancing", f"on, harmless with kernel {answers.kernel}")


def _cores(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    bound, cards = settings.resources.cores_per_process, max(settings.resources.cards, 1)
    if not answers.cores or not bound:
        return passed("cores", f"{answers.cores or 'unknown'}, processes are not bound")
    if bound * cards > answers.cores:
        remedy = f"set resources.cores_per_process to {max(answers.cores // cards, 1)}"
        return failed("cores", f"{answers.cores} physical cores, {cards} x {bound} requested", remedy)
    return passed("cores", f"{answers.cores} physical cores, {cards} x {bound} requested")


def _runtime(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    if not answers.runtimes.strip():
        remedy = "install and start Docker to use --on docker; --on local needs none"
        return warning("container runtime", "docker does not answer", remedy)
    try:
        names = sorted(json.loads(answers.runtimes))
    except ValueError:
        return warning("container runtime", "docker answers something else", "see `docker info`")
    if settings.resources.cards and "habana" not in names:
        remedy = "install habana-container-runtime and restart Docker"
        return failed("container runtime", f"docker knows {', '.join(names)}, not habana", remedy)
    return passed("container runtime", f"docker knows {', '.join(names)}")


def _ports(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    lines = [line.split() for line in answers.tcp.splitlines()[1:]]
    listening = {int(parts[1].rpartition(":")[2], 16) for parts in lines if len(parts) > 3 and parts[3] == _LISTENING}
    if EFA_SSH_PORT in listening:
        remedy = "stop what listens there: workers on the node's network start sshd on it"
        return warning("ports", f"{EFA_SSH_PORT} is taken", remedy)
    return passed("ports", f"{EFA_SSH_PORT} is free")


_CHECKS: tuple[Callable[[HostAnswers, PipelineSettings], CheckResult], ...] = (
    _driver,
    _cards,
    _modules,
    _hugepages,
    _memory_lock,
    _numa,
    _cores,
    _runtime,
    _ports,
)
