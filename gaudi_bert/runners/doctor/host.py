"""What a machine answers about its driver, cards, memory, container runtime and ports; what that means for a pipeline."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gaudi_bert.common.errors import has_tensorflow, install_command
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning
from gaudi_bert.runners.launch import EFA_SSH_PORT
from gaudi_bert.runners.stage_table import quantity_value

_COMMAND_SECONDS = 20
# The release of the image of each engine: docker/train-gaudi.Dockerfile, docker/train-gaudi-pytorch.Dockerfile.
_IMAGE_RELEASES: Mapping[EngineName, str] = {"tensorflow": "1.14.0", "pytorch": "1.24.0"}
_BRIDGES: Mapping[EngineName, str] = {"tensorflow": "habana-tensorflow", "pytorch": "habana-torch-plugin"}


@dataclass(frozen=True)
class GaudiFacts:
    """What is known of cards; an empty text is unknown.

    `driver` and `tools` are releases, as `1.24.0`; `cards` are names, as `HL-225`; `source` is where they come from.
    """

    driver: str = ""
    tools: str = ""
    cards: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Packages:
    """The version of Python, and of what is installed there; an empty text is not installed.

    `bridges` are the vendor's packages by which the engines use Gaudi cards.
    """

    python: tuple[int, int] = (3, 11)
    tensorflow: str = ""
    torch: str = ""
    transformers: str = ""
    bridges: Mapping[EngineName, str] = field(default_factory=lambda: _NO_BRIDGES)


@dataclass(frozen=True)
class HostAnswers:
    """What the machine answered; an empty text is a command or file that does not exist.

    `hlml` is what the vendor's library reports, `modules` the output of `hl-smi -Q`, `runtimes` that of `docker info`;
    `device_nodes` are the names below /dev/accel and the /dev/hl* of old drivers. `memory_lock` is in bytes, -1 without
    limit; `cores` are physical ones, 0 where that is not known; `environment` holds the variables that start with HABANA_.
    """

    hl_smi: str = ""
    hlml: str = ""
    modules: str = ""
    device_nodes: tuple[str, ...] = ()
    meminfo: str = ""
    numa_balancing: str = ""
    kernel: str = ""
    memory_lock: int = -1
    runtimes: str = ""
    tcp: str = ""
    cores: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Packages = field(default_factory=Packages)

    @property
    def gaudi(self) -> GaudiFacts:
        """What is known of the cards and the driver."""
        return _read_facts(self.hl_smi, self.hlml)

    def as_json(self) -> dict[str, Any]:
        """What a program may want to know of this machine."""
        states = _engine_states(self.packages, on_cards=bool(self.device_nodes))
        return {
            "gaudi": asdict(self.gaudi) | {"bridges": dict(self.packages.bridges)},
            "engines": {state.name: state.as_json() for state in states},
        }


def ask_host() -> HostAnswers:
    """Ask this machine."""
    # Besides each device, later drivers have a node that controls it.
    nodes = [path.name for pattern in ("accel/accel[0-9]*", "hl[0-9]*") for path in sorted(Path("/dev").glob(pattern))]
    return HostAnswers(
        hl_smi=_output("hl-smi"),
        hlml=_output(sys.executable, "-m", "gaudi_bert.runners.doctor.host") if find_spec("pyhlml") else "",
        modules=_output("hl-smi", "-Q", "module_id,bus_id", "--format=csv"),
        device_nodes=tuple(nodes),
        meminfo=_content("/proc/meminfo"),
        numa_balancing=_content("/proc/sys/kernel/numa_balancing"),
        kernel=platform.release(),
        memory_lock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        runtimes=_output("docker", "info", "--format", "{{json .Runtimes}}"),
        tcp=_content("/proc/net/tcp"),
        cores=len(set(re.findall(r"physical id\s*: (\d+)[\s\S]*?core id\s*: (\d+)", _content("/proc/cpuinfo")))),
        environment={name: value for name, value in os.environ.items() if name.startswith("HABANA_")},
        packages=_ask_packages(),
    )


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


# --- checks: what the vendor's documentation requires

_LISTENING = "0A"
_PAGE_BYTES = 2 * 2**20


def check_host(answers: HostAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One result per check, in an order in which fixing makes sense; without any cards, only what matters there."""
    engines = _check_engines(answers.packages, settings, on_cards=bool(answers.device_nodes))
    if not settings.resources.cards and not answers.device_nodes and not answers.gaudi.cards:
        cards = passed("cards", "none here, and the pipeline asks for none")
        return [engines, cards, _runtime(answers, settings)]
    return [
        engines,
        _check_driver(answers.gaudi, answers.packages.bridges, settings),
        _check_software(answers.gaudi, answers.packages.bridges),
        _check_cards(answers.gaudi, answers.device_nodes, settings),
        *(check(answers, settings) for check in (_modules, _hugepages, _memory_lock, _numa, _cores, _runtime, _ports)),
    ]


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


# --- the cards, the driver and the vendor's software, and whether their releases belong together
#
# The vendor numbers three parts alike. The driver is in the kernel of the host; the tools (hl-smi) and the bridge, by which
# a framework uses cards, are in the image, or on a host where the vendor's framework is installed. What hl-smi does not
# tell, the package habana-pyhlml may, which this file asks where it is run as a program.


def _read_facts(hl_smi: str, hlml: str) -> GaudiFacts:
    """What the table of `hl-smi` states; where that names no driver, the JSON of `_ask_library`."""
    tools = _release(r"^\|?\s*HL-SMI Version:\s*hl-", hl_smi)
    # Later releases have a line for the driver of the network, too.
    driver = _release(r"^\|?\s*Driver Version:\s*", hl_smi)
    if driver:
        cards = re.findall(r"^\|\s*\d+\s+(HL-\S+)", hl_smi, re.MULTILINE)
        return GaudiFacts(driver, tools, tuple(cards), "hl-smi")
    try:
        answer = json.loads(hlml.splitlines()[-1])
        return GaudiFacts(_release(r"^", answer["driver"]), tools, tuple(answer["cards"]), "pyhlml")
    except (IndexError, KeyError, TypeError, ValueError):
        return GaudiFacts(tools=tools)


def _release(before: str, text: str) -> str:
    """The first three numbers after a pattern, as `1.24.0`."""
    match = re.search(rf"{before}(\d+\.\d+\.\d+)", text, re.MULTILINE)
    return match[1] if match else ""


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _check_driver(facts: GaudiFacts, bridges: Mapping[EngineName, str], settings: PipelineSettings) -> CheckResult:
    """Driver and software must be of one release; `bridges` are the versions that are installed here."""
    engine = settings.training.engine
    if engine == "auto":  # the only one with a bridge here, or that of the image for cards
        engine = "tensorflow" if bridges["tensorflow"] and not bridges["pytorch"] else "pytorch"
    software = _release(r"^", bridges[engine]) or _IMAGE_RELEASES[engine]
    if not facts.driver:
        remedy = f"install the Gaudi driver {software} (habanalabs-dkms)"
        return failed("driver", "hl-smi is missing or does not answer", remedy)
    if facts.driver == software:
        return passed("driver", f"driver and image are both {software}")
    finding = f"driver {facts.driver}, but software {software} in the image for {engine}"
    remedy = _remedy(facts.driver, software, engine)
    # Within a release, the last number counts corrections.
    same = _numbers(facts.driver)[:2] == _numbers(software)[:2]
    return warning("driver", finding, remedy) if same else failed("driver", finding, remedy)


def _remedy(driver: str, software: str, engine: EngineName) -> str:
    if engine == "pytorch" and driver == _IMAGE_RELEASES["tensorflow"]:
        return "set training.engine to tensorflow, whose image has this release"
    if engine == "pytorch" or _numbers(driver) < _numbers(software):
        return f"install driver {software} on the host, or build the image on the vendor's of {driver} (BASE_IMAGE)"
    if driver == _IMAGE_RELEASES["pytorch"]:
        return "set training.engine to pytorch, whose image has this release"
    return (
        f"set training.engine to pytorch and build its image on the vendor's of {driver} (BASE_IMAGE): "
        f"no later software than {_IMAGE_RELEASES['tensorflow']} has TensorFlow"
    )


def _check_software(facts: GaudiFacts, bridges: Mapping[EngineName, str]) -> CheckResult:
    """Which parts of the vendor's software are here."""
    parts = {"hl-smi": facts.tools, **{name: bridges[engine] for engine, name in _BRIDGES.items()}}
    present = {name: version for name, version in parts.items() if version}
    finding = ", ".join(f"{name} {version}" for name, version in present.items()) or "none here; the images bring it"
    if len({_numbers(_release("^", version))[:2] for version in present.values()}) > 1:
        return warning("software", finding, "these are of several releases: use one image, or install one release")
    return passed("software", finding)


def _check_cards(facts: GaudiFacts, device_nodes: tuple[str, ...], settings: PipelineSettings) -> CheckResult:
    """Whether as many cards are here as the pipeline requests."""
    cards, nodes = settings.resources.cards, len(device_nodes)
    kinds = f" ({', '.join(sorted(set(facts.cards)))})" if facts.cards else ""
    finding = f"{nodes} device nodes{kinds}, the pipeline asks for {cards}"
    if facts.cards and not nodes:
        finding = f"{facts.source} lists {len(facts.cards)}{kinds}, but /dev/accel holds no card"
        return failed("cards", finding, "load the driver (modprobe habanalabs), or give the container its devices")
    if nodes < cards:
        remedy = f"load the driver (modprobe habanalabs), give the container its devices, or set resources.cards to {nodes}"
        return failed("cards", f"{finding} cards", remedy)
    if facts.cards and len(facts.cards) < nodes:
        remedy = "see `hl-smi` and `dmesg`: a card that does not start is not listed"
        return warning("cards", f"{finding}; {facts.source} lists {len(facts.cards)}", remedy)
    return passed("cards", finding)


# --- which engines can run here


_TENSORFLOW = "2.15"
_NO_BRIDGES: Mapping[EngineName, str] = {"tensorflow": "", "pytorch": ""}


@dataclass(frozen=True)
class _EngineState:
    """Whether an engine can run: `reason` is why it cannot, and empty where it can."""

    name: EngineName
    title: str
    reason: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, object]:
        """For machines."""
        return {"runs": not self.reason, "reason": self.reason, "remedy": self.remedy}


def _ask_packages() -> Packages:
    """Ask the Python that runs."""
    return Packages(
        python=sys.version_info[:2],
        tensorflow=_installed("tensorflow-cpu") or _installed("tensorflow"),
        torch=_installed("torch"),
        transformers=_installed("transformers"),
        bridges={engine: _installed(package) for engine, package in _BRIDGES.items()},
    )


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _engine_states(packages: Packages, *, on_cards: bool) -> list[_EngineState]:
    """Both engines; `on_cards`: on the Gaudi cards of this machine."""
    states = [_tensorflow(packages), _pytorch(packages)]
    return [_with_bridge(state, packages) if on_cards else state for state in states]


def _tensorflow(packages: Packages) -> _EngineState:
    version, remedy = packages.tensorflow, install_command("tensorflow")
    title = f"TensorFlow {version}"
    if version.startswith(f"{_TENSORFLOW}."):
        return _EngineState("tensorflow", title)
    if version:
        return _EngineState("tensorflow", title, f"TensorFlow is {version}, and {_TENSORFLOW} is needed", remedy)
    if not has_tensorflow(packages.python):
        python = ".".join(map(str, packages.python))
        return _EngineState("tensorflow", title, f"TensorFlow {_TENSORFLOW} has no version for Python {python}", remedy)
    return _EngineState("tensorflow", title, "TensorFlow is not installed", remedy)


def _pytorch(packages: Packages) -> _EngineState:
    if not packages.torch:
        return _EngineState("pytorch", "PyTorch", "PyTorch is not installed", install_command("pytorch"))
    only = "" if packages.transformers else ", BERT only: transformers is not installed"
    return _EngineState("pytorch", f"PyTorch {packages.torch}{only}")


def _with_bridge(state: _EngineState, packages: Packages) -> _EngineState:
    """An engine on cards, which needs the vendor's framework and bridge."""
    if packages.bridges[state.name] and not state.reason:
        return state
    module = {"tensorflow": "habana_frameworks.tensorflow", "pytorch": "habana_frameworks.torch"}[state.name]
    remedy = f"install {_BRIDGES[state.name]} of the driver's release, with the vendor's framework"
    reason = state.reason or f"{module} is not installed, which the cards need"
    return _EngineState(state.name, state.title, reason, remedy)


def _check_engines(packages: Packages, settings: PipelineSettings, *, on_cards: bool) -> CheckResult:
    """Which engine can run here, and why the other cannot; a warning where none can, or not the one that is named."""
    states = _engine_states(packages, on_cards=on_cards)
    named = settings.training.engine
    finding = f"Python {'.'.join(map(str, packages.python))}: {'; '.join(_described(states))}"
    missing = [state for state in states if state.reason and named in ("auto", state.name)]
    if all(state.reason for state in states) or (named != "auto" and missing):
        # PyTorch runs on every Python.
        first = missing[-1]
        return warning("engines", finding, f"to train by {first.name}: {first.remedy}; or use --on docker")
    return passed("engines", finding)


def _described(states: list[_EngineState]) -> Iterator[str]:
    for state in states:
        yield f"{state.name} does not run ({state.reason})" if state.reason else f"{state.name} runs ({state.title})"
    if all(state.reason for state in states):
        yield "estimate, pack, verify and import need neither"


# --- what the vendor's library of cards reports, as one line of JSON: `python3 -m gaudi_bert.runners.doctor.host`
#
# In a separate process, because the library prints, and may end the process where the driver does not answer.


def _ask_library(library: Any) -> dict[str, Any]:
    """The driver's version, and the name of each card."""
    library.hlmlInit()
    try:
        handles = [library.hlmlDeviceGetHandleByIndex(index) for index in range(library.hlmlDeviceGetCount())]
        names = [_text(library.hlmlDeviceGetName(handle)) for handle in handles]
        return {"driver": _text(library.hlmlGetDriverVersion()), "cards": names}
    finally:
        library.hlmlShutdown()


def _text(value: bytes | str) -> str:
    """A text of the library, which fills its buffers with zeros."""
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else value).strip("\0 \n")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_ask_library(importlib.import_module("pyhlml"))) + "\n")
