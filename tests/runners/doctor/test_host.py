"""The checks of a machine, on recorded answers and by the command with a stand-in for hl-smi."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.doctor.checks import CheckResult
from gaudi_bert.runners.doctor.host import HostAnswers, ask_host, check_host
from tests.builders.machines import hl_smi_table, put_hl_smi

CARDS = load_pipeline(None, ["resources.cards=8", "resources.training={cpu: 95, memory: 409Gi}"])
TENSORFLOW = {"tensorflow": "2.15.1", "habana-tensorflow": "1.14.0.493"}
PYTORCH = {"torch": "2.10.0", "habana-torch-plugin": "1.24.0.481"}
SERVER = HostAnswers(
    hl_smi=hl_smi_table("1.24.0", cards=8), device_nodes=tuple(f"accel{number}" for number in range(8)), packages=PYTORCH
)


def wrong(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.check: result for result in results if result.verdict != "ok"}


def test_a_good_server_is_ready() -> None:
    assert wrong(check_host(SERVER, CARDS)) == {}
    assert SERVER.cards == ["HL-225"] * 8


@pytest.mark.parametrize(
    ("changed", "check", "verdict", "named"),
    [
        ({"hl_smi": ""}, "driver", "failed", "1.24.0"),
        ({"hl_smi": hl_smi_table("1.24.2", cards=8)}, "driver", "warning", "1.24.2"),
        ({"hl_smi": hl_smi_table("1.22.1", cards=8)}, "driver", "failed", "1.22.1"),
        ({"hl_smi": hl_smi_table("1.14.0", cards=8)}, "driver", "failed", "set training.engine to tensorflow"),
        ({"hl_smi": hl_smi_table("1.24.0", cards=7)}, "cards", "warning", "lists 7"),
        ({"device_nodes": ("accel0", "accel1")}, "cards", "failed", "resources.cards to 2"),
        ({"device_nodes": ()}, "cards", "failed", "modprobe habanalabs"),
        ({"disk": 2**30}, "disk", "warning", "1.0 GiB"),
        ({"packages": {"torch": "2.10.0", **TENSORFLOW}}, "driver", "failed", "1.14.0"),
    ],
)
def test_what_is_wrong_has_a_remedy(changed: dict[str, Any], check: str, verdict: str, named: str) -> None:
    found = wrong(check_host(dataclasses.replace(SERVER, **changed), CARDS))
    assert {name: result.verdict for name, result in found.items()} == {check: verdict}
    assert named in str(found[check])
    assert found[check].remedy


def test_the_driver_of_the_network_is_not_taken_for_the_driver() -> None:
    lines = hl_smi_table("1.24.0", cards=2).splitlines()
    network = next(line for line in lines if "Nic Driver" in line)
    first = [lines[0], network.replace("1.24.0", "1.22.0"), *(line for line in lines[1:] if line != network)]
    assert HostAnswers("\n".join(first)).driver == "1.24.0"


@pytest.mark.parametrize(
    ("packages", "python", "engine", "verdict"),
    [
        ({"torch": "2.13"}, (3, 12), "auto", "ok"),
        ({"tensorflow-cpu": "2.15.1"}, (3, 11), "auto", "ok"),
        ({"torch": "2.13"}, (3, 12), "tensorflow", "warning"),
        ({"tensorflow": "2.16.1"}, (3, 11), "auto", "warning"),
        ({}, (3, 13), "auto", "warning"),
    ],
)
def test_an_engine_that_is_named_must_run(
    packages: dict[str, str], python: tuple[int, int], engine: str, verdict: str
) -> None:
    results = check_host(HostAnswers(packages=packages, python=python), load_pipeline(None, [f"training.engine={engine}"]))
    assert [(result.check, result.verdict) for result in results[:1]] == [("engines", verdict)]
    assert [result.check for result in results] == ["engines", "extras", "cards", "disk"]


def test_on_cards_an_engine_needs_its_bridge() -> None:
    results = check_host(dataclasses.replace(SERVER, packages={"torch": "2.13"}), CARDS)
    assert "habana-torch-plugin" in wrong(results)["engines"].found


def test_this_machine_can_be_asked() -> None:
    assert all(result.remedy for result in check_host(ask_host(), CARDS) if result.verdict != "ok")


def test_the_command_asks_hl_smi(tmp_path: Path) -> None:
    put_hl_smi(tmp_path, hl_smi_table("1.24.0", cards=2, name="HL-325L"), "")
    command = [sys.executable, "-m", "gaudi_bert", "doctor", "--set", "resources.cards=8", "--json"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    printed = json.loads(done.stdout)
    assert (done.returncode, printed["ready"]) == (1, False)
    assert (printed["driver"], printed["cards"]) == ("1.24.0", ["HL-325L", "HL-325L"])
    verdicts = {finding["check"]: finding["verdict"] for finding in printed["findings"]}
    assert (verdicts["driver"], verdicts["cards"]) == ("ok", "failed")
