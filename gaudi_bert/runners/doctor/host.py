"""Is this machine ready for a pipeline: Python, the engines and extras, the driver of Gaudi cards, the cards, the disk.

The vendor numbers the parts of the Gaudi software alike: the driver, which is in the kernel of the host, and the bridge by
which a framework uses cards, in the image or where the vendor's framework is installed. They must be of one release.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gaudi_bert.common.errors import has_tensorflow, install_command
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning

_COMMAND_SECONDS = 20
# The release of the image of each engine: docker/train-gaudi.Dockerfile, docker/train-gaudi-pytorch.Dockerfile.
_IMAGE_RELEASES: Mapping[EngineName, str] = {"tensorflow": "1.14.0", "pytorch": "1.24.0"}
_BRIDGES: Mapping[EngineName, str] = {"tensorflow": "habana-tensorflow", "pytorch": "habana-torch-plugin"}
_TENSORFLOW = "2.15"
# A library of each extra that is not an engine.
_EXTRAS = {
    "text": "tokenizers",
    "report": "matplotlib",
    "docker": "docker",
    "kubernetes": "kubernetes",
    "parquet": "pyarrow",
}
# Times the largest group of sequences: what a stage that works in an object store keeps here.
_GROUPS_ON_DISK = 3


@dataclass(frozen=True)
class HostAnswers:
    """Answers of the machine; an empty text is a command or package that is not there.

    `device_nodes` are the names below /dev/accel and the /dev/hl* of old drivers; `packages` holds the version of each
    package; `disk` is the space that is free in the current folder.
    """

    hl_smi: str = ""
    device_nodes: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 11)
    packages: Mapping[str, str] = field(default_factory=dict)
    missing_extras: tuple[str, ...] = ()
    disk: int = 2**50

    def version(self, package: str) -> str:
        """Return the version of a package; an empty text where it is not installed."""
        return self.packages.get(package, "")

    @property
    def driver(self) -> str:
        """The release of the driver, as `1.24.0`; later releases have a line for the driver of the network, too."""
        return _release(r"^\|?\s*Driver Version:\s*", self.hl_smi)

    @property
    def cards(self) -> list[str]:
        """The names of the cards that `hl-smi` lists, as `HL-225`."""
        return re.findall(r"^\|\s*\d+\s+(HL-\S+)", self.hl_smi, re.MULTILINE)

    def as_json(self) -> dict[str, Any]:
        """Return the answers for programs."""
        return {**asdict(self), "driver": self.driver, "cards": self.cards}


def ask_host() -> HostAnswers:
    """Ask this machine."""
    # Besides each device, later drivers have a node that controls it.
    nodes = [path.name for pattern in ("accel/accel[0-9]*", "hl[0-9]*") for path in sorted(Path("/dev").glob(pattern))]
    names = ("tensorflow-cpu", "tensorflow", "torch", "transformers", *_BRIDGES.values())
    return HostAnswers(
        hl_smi=_output("hl-smi"),
        device_nodes=tuple(nodes),
        python=sys.version_info[:2],
        packages={
            each.metadata["Name"]: each.version for name in names for each in importlib.metadata.distributions(name=name)
        },
        missing_extras=tuple(extra for extra, library in _EXTRAS.items() if find_spec(library) is None),
        disk=shutil.disk_usage(".").free,
    )


def _output(command: str) -> str:
    try:
        done = subprocess.run([command], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def check_host(answers: HostAnswers, settings: PipelineSettings) -> list[CheckResult]:
    """One result per check, in an order in which fixing makes sense; without any cards, none of the driver."""
    results = [_check_engines(answers, settings), _check_extras(answers)]
    if settings.resources.cards or answers.device_nodes or answers.cards:
        results += [_check_driver(answers, settings), _check_cards(answers, settings)]
    else:
        results.append(passed("cards", "none here, and the pipeline asks for none"))
    return [*results, _check_disk(answers, settings)]


def _check_engines(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    """Which engine can run here, and why the other cannot: a warning where none can, or not the one that is named."""
    reasons = {"tensorflow": _tensorflow_problem(answers), "pytorch": "" if answers.version("torch") else "not installed"}
    for engine, package in _BRIDGES.items():
        if answers.device_nodes and not reasons[engine] and not answers.version(package):
            reasons[engine] = f"{package} is not installed, which the cards need"
    states = [f"{engine} does not run ({reason})" if reason else f"{engine} runs" for engine, reason in reasons.items()]
    finding = f"Python {'.'.join(map(str, answers.python))}: {', '.join(states)}"
    named = settings.training.engine
    if all(reasons.values()) or reasons.get(named):
        engine = "pytorch" if named == "auto" else named  # which runs on every Python
        bridge = "the vendor's framework of the driver's release"
        remedy = bridge if answers.device_nodes else install_command(engine)
        return warning("engines", finding, f"to train by {engine}: {remedy}; or use --on docker")
    return passed("engines", finding)


def _tensorflow_problem(answers: HostAnswers) -> str:
    version = answers.version("tensorflow-cpu") or answers.version("tensorflow")
    if version.startswith(f"{_TENSORFLOW}."):
        return ""
    if version:
        return f"it is {version}, and {_TENSORFLOW} is needed"
    return "not installed" if has_tensorflow(answers.python) else f"{_TENSORFLOW} has no version for this Python"


def _check_extras(answers: HostAnswers) -> CheckResult:
    if not answers.missing_extras:
        return passed("extras", f"{', '.join(_EXTRAS)} are installed")
    here = ", ".join(extra for extra in _EXTRAS if extra not in answers.missing_extras) or "none"
    missing = f"{', '.join(answers.missing_extras)} (to add them: {install_command(','.join(answers.missing_extras))})"
    return passed("extras", f"installed: {here}; not installed: {missing}")


def _release(before: str, text: str) -> str:
    """The first three numbers after a pattern, as `1.24.0`."""
    match = re.search(rf"{before}(\d+\.\d+\.\d+)", text, re.MULTILINE)
    return match[1] if match else ""


def _check_driver(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    """Compare the driver with the software that is installed here, or that the image of the engine has."""
    bridges = {engine: answers.version(package) for engine, package in _BRIDGES.items()}
    engine = settings.training.engine
    if engine == "auto":
        engine = "tensorflow" if bridges["tensorflow"] and not bridges["pytorch"] else "pytorch"
    software, driver = _release("^", bridges[engine]) or _IMAGE_RELEASES[engine], answers.driver
    if not driver:
        remedy = f"install the Gaudi driver {software} (habanalabs-dkms)"
        return failed("driver", "hl-smi is missing or does not answer", remedy)
    if driver == software:
        return passed("driver", f"driver and software for {engine} are both {driver}")
    finding = f"driver {driver}, but software {software} for {engine}"
    other = next((each for each, release in _IMAGE_RELEASES.items() if release == driver), None)
    remedy = f"install driver {software} on the host, or build the image on the vendor's of {driver} (BASE_IMAGE)"
    if other is not None:
        remedy = f"set training.engine to {other}, whose image has this release, or {remedy}"
    # Within a release, the last number counts corrections.
    verdict = warning if driver.split(".")[:2] == software.split(".")[:2] else failed
    return verdict("driver", finding, remedy)


def _check_cards(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    """Compare the cards that are here with those that the pipeline requests."""
    requested, nodes, listed = settings.resources.cards, len(answers.device_nodes), len(answers.cards)
    kinds = f" ({', '.join(sorted(set(answers.cards)))})" if answers.cards else ""
    finding = f"{nodes} device nodes, hl-smi lists {listed}{kinds}, the pipeline asks for {requested}"
    load = "load the driver (modprobe habanalabs), or give the container its devices"
    if listed and not nodes:
        return failed("cards", finding, load)
    if nodes < requested:
        return failed("cards", finding, f"{load}, or set resources.cards to {nodes}")
    if listed and listed < nodes:
        return warning("cards", finding, "see `hl-smi` and `dmesg`: a card that does not start is not listed")
    return passed("cards", finding)


def _check_disk(answers: HostAnswers, settings: PipelineSettings) -> CheckResult:
    needed = _GROUPS_ON_DISK * settings.packing.group_bytes
    finding = f"{answers.disk / 2**30:.1f} GiB free in the current folder"
    if answers.disk < needed:
        remedy = f"free {needed / 2**30:.1f} GiB, or lower packing.group_bytes"
        return warning("disk", finding, remedy)
    return passed("disk", finding)
