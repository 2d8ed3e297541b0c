"""The cards of a machine, its driver and the vendor's software, and whether their releases belong together.

The vendor numbers three parts alike. The driver is in the kernel of the host; the tools (hl-smi) and the bridge, by which a
framework uses cards, are in the image, or on a host where the vendor's framework is installed. What hl-smi does not tell,
the package habana-pyhlml may, which this file asks where it is run as a program.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.config.values import EngineName
from gaudi_bert.runners.doctor.checks import CheckResult, failed, passed, warning

# The release of the image of each engine: docker/train-gaudi.Dockerfile, docker/train-gaudi-pytorch.Dockerfile.
_IMAGE_RELEASES: Mapping[EngineName, str] = {"tensorflow": "1.14.0", "pytorch": "1.24.0"}
BRIDGES: Mapping[EngineName, str] = {"tensorflow": "habana-tensorflow", "pytorch": "habana-torch-plugin"}


@dataclass(frozen=True)
class GaudiFacts:
    """What is known of cards; an empty text is unknown.

    `driver` and `tools` are releases, as `1.24.0`; `cards` are names, as `HL-225`; `source` is where they come from.
    """

    driver: str = ""
    tools: str = ""
    cards: tuple[str, ...] = ()
    source: str = ""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def read_facts(hl_smi: str, hlml: str) -> GaudiFacts:
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


def check_driver(facts: GaudiFacts, bridges: Mapping[EngineName, str], settings: PipelineSettings) -> CheckResult:
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


def check_software(facts: GaudiFacts, bridges: Mapping[EngineName, str]) -> CheckResult:
    """Which parts of the vendor's software are here."""
    parts = {"hl-smi": facts.tools, **{name: bridges[engine] for engine, name in BRIDGES.items()}}
    present = {name: version for name, version in parts.items() if version}
    finding = ", ".join(f"{name} {version}" for name, version in present.items()) or "none here; the images bring it"
    if len({_numbers(_release("^", version))[:2] for version in present.values()}) > 1:
        return warning("software", finding, "these are of several releases: use one image, or install one release")
    return passed("software", finding)


def check_cards(facts: GaudiFacts, device_nodes: tuple[str, ...], settings: PipelineSettings) -> CheckResult:
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


# --- what the vendor's library of cards reports, as one line of JSON: `python3 -m gaudi_bert.runners.doctor.gaudi`
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
