"""Cards, driver and software: what stands in for hl-smi and pyhlml is asked by the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.doctor.gaudi import GaudiFacts, check_driver, check_software, read_facts
from tests.builders.machines import hl_smi_table, put_hl_smi, put_pyhlml

NONE = {"tensorflow": "", "pytorch": ""}
GAUDI_3 = hl_smi_table("1.24.0", cards=2, name="HL-325L")


def test_driver_tools_and_cards_are_told_apart() -> None:
    facts = read_facts(hl_smi_table("1.24.1", tools="1.24.0", cards=2, name="HL-325L"), "")
    assert facts == GaudiFacts("1.24.1", "1.24.0", ("HL-325L", "HL-325L"), "hl-smi")
    assert read_facts("", "") == GaudiFacts()
    assert read_facts("Failed to initialize the library\n", "Failed to load libhlml\n") == GaudiFacts()


def test_the_drivers_of_the_network_are_not_taken_for_the_driver() -> None:
    lines = GAUDI_3.splitlines()
    network = next(line for line in lines if "Nic Driver" in line)
    first = [lines[0], network.replace("1.24.0", "1.22.0"), *(line for line in lines[1:] if line != network)]
    assert read_facts("\n".join(first), "").driver == "1.24.0"


@pytest.mark.parametrize(
    ("driver", "engine", "bridges", "verdict", "said"),
    [
        ("1.24.0", "pytorch", NONE, "ok", "driver and image are both 1.24.0"),
        ("1.24.2", "pytorch", NONE, "warning", "driver 1.24.2, but software 1.24.0 in the image for pytorch"),
        ("1.22.1", "pytorch", NONE, "failed", "or build the image on the vendor's of 1.22.1 (BASE_IMAGE)"),
        ("1.22.1", "pytorch", {**NONE, "pytorch": "1.22.1.6"}, "ok", "driver and image are both 1.22.1"),
        ("1.14.0", "auto", NONE, "ok", "driver and image are both 1.14.0"),
        ("1.24.0", "auto", NONE, "failed", "set training.engine to pytorch, whose image has this release"),
        ("1.24.0", "auto", {**NONE, "pytorch": "1.24.0.481"}, "ok", "driver and image are both 1.24.0"),
        (
            "1.21.0",
            "tensorflow",
            NONE,
            "failed",
            "set training.engine to pytorch and build its image on the vendor's of 1.21.0",
        ),
        ("1.13.0", "tensorflow", NONE, "failed", "install driver 1.14.0 on the host, or build the image on the vendor's of"),
        ("", "pytorch", NONE, "failed", "install the Gaudi driver 1.24.0 (habanalabs-dkms)"),
    ],
)
def test_driver_and_software_are_of_one_release(
    driver: str, engine: str, bridges: dict[str, str], verdict: str, said: str
) -> None:
    settings = load_pipeline(None, [f"training.engine={engine}", "resources.cards=8"])
    result = check_driver(GaudiFacts(driver=driver), bridges, settings)  # type: ignore[arg-type]
    assert result.verdict == verdict
    assert said in str(result)
    assert bool(result.remedy) == (verdict != "ok")


def test_parts_of_several_releases_are_named() -> None:
    settings = load_pipeline(None)
    mixed = check_software(GaudiFacts(tools="1.22.0"), {"tensorflow": "", "pytorch": "1.24.0.481"}, settings)
    assert (mixed.verdict, mixed.found) == ("warning", "hl-smi 1.22.0, habana-torch-plugin 1.24.0.481")
    same = check_software(GaudiFacts(tools="1.24.0"), {"tensorflow": "", "pytorch": "1.24.1.9"}, settings)
    assert same.verdict == "ok"
    assert check_software(GaudiFacts(), NONE, settings).found == "none here; the images bring it"  # type: ignore[arg-type]


def doctor(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, with the programs and modules of `folder` before all others."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = f"{folder}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "gaudi_bert", "doctor", "--set", "resources.cards=8", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_the_command_asks_hl_smi(tmp_path: Path) -> None:
    modules = "module_id, bus_id\n" + "".join(f"{number}, 0000:{number}3:00.0\n" for number in range(2))
    put_hl_smi(tmp_path, GAUDI_3, modules)
    done = doctor(tmp_path, "--set", "training.engine=pytorch")
    lines = {line[9:].partition(":")[0]: line for line in done.stdout.splitlines()}
    assert lines["driver"] == "ok       driver: driver and image are both 1.24.0"
    assert lines["software"].startswith("ok       software: hl-smi 1.24.0")
    assert lines["cards"].startswith("failed   cards: hl-smi lists 2 (HL-325L), but /dev/accel holds no card")
    assert lines["module ids"] == "ok       module ids: 0, 1"
    assert "engines" in lines
    printed = json.loads(doctor(tmp_path, "--json").stdout)
    assert printed["gaudi"]["driver"] == printed["gaudi"]["tools"] == "1.24.0"
    assert printed["gaudi"]["cards"] == ["HL-325L", "HL-325L"]
    assert printed["engines"].keys() == {"tensorflow", "pytorch"}
    failed = {finding["check"]: finding["remedy"] for finding in printed["findings"] if finding["verdict"] == "failed"}
    assert failed["driver"] == "set training.engine to pytorch, whose image has this release"


@pytest.mark.slow
def test_without_hl_smi_the_command_asks_pyhlml(tmp_path: Path) -> None:
    put_pyhlml(tmp_path, "1.24.0-6bf9e3a", ["HL-225", "HL-225", "HL-225"])
    printed = json.loads(doctor(tmp_path, "--json").stdout)
    assert printed["gaudi"]["source"] == "pyhlml"
    assert (printed["gaudi"]["driver"], printed["gaudi"]["cards"]) == ("1.24.0", ["HL-225"] * 3)


@pytest.mark.slow
def test_a_library_that_does_not_answer_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyhlml.py").write_text("print('Failed to load libhlml')\nraise OSError('no driver')\n")
    printed = json.loads(doctor(tmp_path, "--json").stdout)
    assert printed["gaudi"]["driver"] == printed["gaudi"]["source"] == ""
