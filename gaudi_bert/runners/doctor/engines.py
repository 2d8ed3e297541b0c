"""Which engine can train on a machine, and why another cannot."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gaudi_bert.common.errors import has_tensorflow, install_command
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.runners.doctor.checks import CheckResult, passed, warning
from gaudi_bert.runners.doctor.gaudi import BRIDGES

_TENSORFLOW = "2.15"
_NO_BRIDGES: Mapping[EngineName, str] = {"tensorflow": "", "pytorch": ""}


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
class EngineState:
    """Whether an engine can run: `reason` says why it cannot, and is empty where it can."""

    name: EngineName
    title: str
    reason: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, object]:
        """For machines."""
        return {"runs": not self.reason, "reason": self.reason, "remedy": self.remedy}


def ask_packages() -> Packages:
    """Ask the Python that runs."""
    return Packages(
        python=sys.version_info[:2],
        tensorflow=_installed("tensorflow-cpu") or _installed("tensorflow"),
        torch=_installed("torch"),
        transformers=_installed("transformers"),
        bridges={engine: _installed(package) for engine, package in BRIDGES.items()},
    )


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def engine_states(packages: Packages, *, on_cards: bool) -> list[EngineState]:
    """Both engines; `on_cards`: on the Gaudi cards of this machine."""
    states = [_tensorflow(packages), _pytorch(packages)]
    return [_with_bridge(state, packages) if on_cards else state for state in states]


def _tensorflow(packages: Packages) -> EngineState:
    version, remedy = packages.tensorflow, install_command("tensorflow")
    title = f"TensorFlow {version}"
    if version.startswith(f"{_TENSORFLOW}."):
        return EngineState("tensorflow", title)
    if version:
        return EngineState("tensorflow", title, f"TensorFlow is {version}, and {_TENSORFLOW} is needed", remedy)
    if not has_tensorflow(packages.python):
        python = ".".join(map(str, packages.python))
        return EngineState("tensorflow", title, f"TensorFlow {_TENSORFLOW} has no version for Python {python}", remedy)
    return EngineState("tensorflow", title, "TensorFlow is not installed", remedy)


def _pytorch(packages: Packages) -> EngineState:
    if not packages.torch:
        return EngineState("pytorch", "PyTorch", "PyTorch is not installed", install_command("pytorch"))
    only = "" if packages.transformers else ", BERT only: transformers is not installed"
    return EngineState("pytorch", f"PyTorch {packages.torch}{only}")


def _with_bridge(state: EngineState, packages: Packages) -> EngineState:
    """An engine on cards, which needs the vendor's framework and bridge."""
    if packages.bridges[state.name] and not state.reason:
        return state
    module = {"tensorflow": "habana_frameworks.tensorflow", "pytorch": "habana_frameworks.torch"}[state.name]
    remedy = f"install {BRIDGES[state.name]} of the driver's release, with the vendor's framework"
    reason = state.reason or f"{module} is not installed, which the cards need"
    return EngineState(state.name, state.title, reason, remedy)


def check_engines(packages: Packages, settings: PipelineSettings, *, on_cards: bool) -> CheckResult:
    """Which engine can run here, and why the other cannot; a warning where none can, or not the one that is named."""
    states = engine_states(packages, on_cards=on_cards)
    named = settings.training.engine
    finding = f"Python {'.'.join(map(str, packages.python))}: {'; '.join(_described(states))}"
    missing = [state for state in states if state.reason and named in ("auto", state.name)]
    if all(state.reason for state in states) or (named != "auto" and missing):
        # PyTorch runs on every Python.
        first = missing[-1]
        return warning("engines", finding, f"to train by {first.name}: {first.remedy}; or use --on docker")
    return passed("engines", finding)


def _described(states: list[EngineState]) -> Iterator[str]:
    for state in states:
        yield f"{state.name} does not run ({state.reason})" if state.reason else f"{state.name} runs ({state.title})"
    if all(state.reason for state in states):
        yield "estimate, pack, verify and import need neither"
