"""Checks of one machine: driver, cards, huge pages, memory lock, NUMA balancing, container runtime, ports.

What is looked at is what the vendor's documentation asks for (Gaudi software 1.14.0, the last with TensorFlow). On a machine
without cards, for a pipeline without cards, only what matters there is judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.doctor.check_result import CheckResult, failed, passed, warning
from gaudi_bert.runners.doctor.host_answers import HostAnswers
from gaudi_bert.runners.mpirun import EFA_SSH_PORT
from gaudi_bert.runners.pod_resources import quantity_value

__all__ = ["check_host"]

SOFTWARE = "1.14.0"
_LISTENING = "0A"
_PAGE_BYTES = 2 * 2**20


def check_host(answers: HostAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One result per check, in an order in which mending makes sense."""
    if not settings.resources.cards and not answers.device_nodes:
        return [passed("cards", "none here, and the pipeline asks for none"), _runtime(answers, settings)]
    return [check(answers, settings) for check in _CHECKS]


def _driver(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    match = re.search(r"Driver Version:\s*(\d+\.\d+\.\d+)", answers.hl_smi)
    if match is None:
        return failed(
            "driver", "hl-smi is not there or does not answer", f"install the Gaudi driver {SOFTWARE} (habanalabs-dkms)"
        )
    version, image = match[1], answers.software[: len(SOFTWARE)] or SOFTWARE
    if version != image:
        remedy = f"install driver {image} on the host, or use an image of software {version}"
        return failed("driver", f"driver {version}, but software {image} in the image", remedy)
    return passed("driver", f"driver and image are both {version}")


def _cards(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    wanted, found = settings.resources.cards, len(answers.device_nodes)
    if found < wanted:
        remedy = f"load the driver (modprobe habanalabs), give the container its devices, or set resources.cards to {found}"
        return failed("cards", f"{found} device nodes, the pipeline asks for {wanted} cards", remedy)
    return passed("cards", f"{found} device nodes, the pipeline asks for {wanted}")


def _modules(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    modules = re.findall(r"^\s*(\d+)\s*,", answers.modules, re.MULTILINE)
    if not modules:
        return warning("module ids", "hl-smi lists none", "see `hl-smi -Q module_id,bus_id --format=csv`")
    if len(set(modules)) != len(modules):
        return failed("module ids", f"{', '.join(modules)}: some are twice", "reset the cards or reboot the server")
    visible = answers.environment.get("HABANA_VISIBLE_MODULES")
    if visible and len(visible.split(",")) != settings.resources.cards:
        remedy = "set resources.cards to their number, or unset the variable"
        return failed("module ids", f"HABANA_VISIBLE_MODULES={visible}, {settings.resources.cards} cards asked for", remedy)
    return passed("module ids", ", ".join(sorted(modules, key=int)))


def _hugepages(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    total, free = (_meminfo(answers, f"HugePages_{kind}") for kind in ("Total", "Free"))
    size = _meminfo(answers, "Hugepagesize") * 1024
    wanted = quantity_value(settings.resources.hugepages_2Mi)
    pages = int(-(-wanted // _PAGE_BYTES))
    if size not in (0, _PAGE_BYTES):
        return failed("huge pages", f"the page size is {size // 1024} kB", "boot with default_hugepagesz=2M")
    if free < pages:
        return failed(
            "huge pages", f"{free} of {total} free, {pages} asked for", f"sysctl -w vm.nr_hugepages={total - free + pages}"
        )
    if not total:
        return warning("huge pages", "none reserved", "the vendor asks for them: 95000 MiB for 8 Gaudi2 cards")
    return passed("huge pages", f"{free} of {total} free, {pages} asked for")


def _meminfo(answers: HostAnswers, key: str) -> int:
    match = re.search(rf"^{key}:\s*(\d+)", answers.meminfo, re.MULTILINE)
    return int(match[1]) if match else 0


def _memory_lock(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    if answers.memory_lock == -1:
        return passed("memory lock", "unlimited")
    found = f"at most {answers.memory_lock // 1024} kB"
    return failed("memory lock", found, "ulimit -l unlimited (docker run --ulimit memlock=-1:-1)")


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
        return failed("cores", f"{answers.cores} physical cores, {cards} x {bound} asked for", remedy)
    return passed("cores", f"{answers.cores} physical cores, {cards} x {bound} asked for")


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
