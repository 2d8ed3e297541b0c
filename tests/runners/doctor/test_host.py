"""The checks of a machine, on recorded answers and by the command with stand-ins for the vendor's tools; and of a store."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runners.doctor.checks import CheckResult, examine_store
from gaudi_bert.runners.doctor.host import (
    GaudiFacts,
    HostAnswers,
    Packages,
    _check_driver,
    _check_engines,
    _check_software,
    _engine_states,
    _read_facts,
    ask_host,
    check_host,
)
from tests.builders.command_line import run_command
from tests.builders.machines import hl_smi_table, put_hl_smi, put_pyhlml
from tests.builders.s3_server import S3Server, quick

SERVER_OF_8 = ["resources.cards=8", "resources.hugepages_2Mi=95000Mi", "resources.training={cpu: 95, memory: 409Gi}"]
CARDS = load_pipeline(None, [*SERVER_OF_8, "resources.cores_per_process=6"])

HL_SMI = hl_smi_table("1.14.0", cards=8)
BRIDGES = {"tensorflow": "1.14.0.493", "pytorch": ""}
MODULES = "module_id, bus_id\n" + "".join(f"{number}, 0000:{number}3:00.0\n" for number in (3, 1, 0, 2, 6, 7, 4, 5))
MEMINFO = "MemTotal: 1056293516 kB\nHugePages_Total:   48000\nHugePages_Free:    47900\nHugepagesize:       2048 kB\n"
LISTENING = "   0: 00000000:0016 00000000:0000 0A\n"
TCP = f"  sl  local_address rem_address   st\n{LISTENING}   1: 0100007F:0BCE 00000000:0000 01\n"
SERVER = HostAnswers(
    hl_smi=HL_SMI,
    modules=MODULES,
    device_nodes=tuple(f"accel{number}" for number in range(8)),
    packages=Packages(tensorflow="2.15.0", bridges=BRIDGES),
    meminfo=MEMINFO,
    numa_balancing="0\n",
    kernel="5.15.0-91-generic",
    memory_lock=-1,
    runtimes='{"habana": {"path": "habana-container-runtime"}, "runc": {"path": "runc"}}\n',
    tcp=TCP,
    cores=56,
)


def wrong(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.check: result for result in results if result.verdict != "ok"}


@pytest.mark.parametrize("harmless", [{}, {"numa_balancing": "1", "kernel": "6.8.0"}], ids=["as it should be", "NUMA"])
def test_a_good_server_is_ready(harmless: dict[str, Any]) -> None:
    """NUMA balancing does no harm on newer kernels."""
    assert wrong(check_host(dataclasses.replace(SERVER, **harmless), CARDS)) == {}


@pytest.mark.parametrize(
    ("changed", "check", "verdict", "said"),
    [
        ({"hl_smi": ""}, "driver", "failed", "install the Gaudi driver 1.14.0"),
        ({"hl_smi": hl_smi_table("1.15.1", tools="1.14.0")}, "driver", "failed", "driver 1.15.1, but software 1.14.0"),
        ({"hl_smi": hl_smi_table("1.14.0", cards=7)}, "cards", "warning", "the pipeline asks for 8; hl-smi lists 7"),
        ({"hl_smi": hl_smi_table("1.14.0", tools="1.16.2")}, "software", "warning", "hl-smi 1.16.2, habana-tensorflow 1.14"),
        ({"device_nodes": ("accel0", "accel1")}, "cards", "failed", "2 device nodes (HL-225), the pipeline asks for 8"),
        ({"device_nodes": ()}, "cards", "failed", "hl-smi lists 8 (HL-225), but /dev/accel holds no card"),
        ({"modules": ""}, "module ids", "warning", "hl-smi lists none"),
        ({"modules": MODULES.replace("7,", "6,")}, "module ids", "failed", "some are twice"),
        ({"environment": {"HABANA_VISIBLE_MODULES": "0,1"}}, "module ids", "failed", "HABANA_VISIBLE_MODULES=0,1"),
        ({"meminfo": MEMINFO.replace("47900", "40000")}, "huge pages", "failed", "vm.nr_hugepages=55500"),
        ({"meminfo": MEMINFO.replace("2048 kB", "1048576 kB")}, "huge pages", "failed", "default_hugepagesz=2M"),
        ({"memory_lock": 8192 * 1024}, "memory lock", "failed", "at most 8192 kB; ulimit -l unlimited"),
        ({"numa_balancing": "1"}, "NUMA balancing", "failed", "kernel.numa_balancing=0"),
        ({"cores": 32}, "cores", "failed", "set resources.cores_per_process to 4"),
        ({"runtimes": '{"runc": {}}'}, "container runtime", "failed", "not habana; install habana-container-runtime"),
        ({"runtimes": ""}, "container runtime", "warning", "docker does not answer"),
        ({"runtimes": "<html>"}, "container runtime", "warning", "docker answers something else"),
        ({"tcp": TCP.replace("00000000:0016", "00000000:0BCE")}, "ports", "warning", "3022 is taken"),
    ],
)
def test_what_is_wrong_with_a_host_has_a_remedy(changed: dict[str, Any], check: str, verdict: str, said: str) -> None:
    found = wrong(check_host(dataclasses.replace(SERVER, **changed), CARDS))
    assert list(found) == [check]
    assert found[check].verdict == verdict
    assert said in str(found[check])


def test_a_laptop_is_not_asked_for_what_only_cards_need() -> None:
    results = check_host(HostAnswers(runtimes='{"runc": {}}'), load_pipeline(None))
    verdicts = [(result.check, result.verdict) for result in results]
    assert verdicts == [("engines", "warning"), ("cards", "ok"), ("container runtime", "ok")]


def test_cards_without_device_nodes_are_named_though_the_pipeline_asks_for_none() -> None:
    answers = dataclasses.replace(SERVER, device_nodes=())
    assert "hl-smi lists 8 (HL-225)" in str(wrong(check_host(answers, load_pipeline(None)))["cards"])


def test_this_machine_can_be_asked() -> None:
    results = check_host(ask_host(), CARDS)
    assert len(results) == 11
    assert all(result.remedy for result in results if result.verdict != "ok")


# --- `doctor --store URL`: what can be done there, and what is missing


def stored(endpoint: str, **changes: Any) -> PipelineSettings:
    return load_pipeline(None).model_copy(update={"store": quick(endpoint, **changes)})


def test_a_place_that_is_ready_is_left_as_it_was(s3: S3Server) -> None:
    found = examine_store("s3://bucket/ready/", stored(s3.endpoint))
    assert str(found) == "ok       store: s3://bucket/ready: write, read, list and remove"
    assert Objects(quick(s3.endpoint)).list("s3://bucket/ready") == {}


def test_what_is_missing_is_named(s3: S3Server) -> None:
    bucket = examine_store("s3://no-such-bucket/x", stored(s3.endpoint))
    assert (bucket.verdict, bucket.remedy) == ("failed", "create it, or check the URL")
    assert "no such bucket" in bucket.found
    away = examine_store("s3://bucket/x", stored("http://127.0.0.1:9", timeout_seconds=1))
    assert away.verdict == "failed"
    assert "(3 attempts)" in away.found
    with pytest.raises(InputError, match="is not an object-store URL"):
        examine_store("bucket/x", stored(s3.endpoint))


def test_from_the_command_line(s3: S3Server) -> None:
    command = ("doctor", "--set", f"store.endpoint_url={s3.endpoint}", "--store")
    ready = run_command(*command, "s3://bucket/x")
    assert (ready.returncode, ready.stderr) == (0, "")
    missing = run_command(*command, "s3://no-such-bucket/x")
    assert missing.returncode == 1
    assert "create it, or check the URL" in missing.stdout


# --- cards, driver and software: what stands in for hl-smi and pyhlml is asked by the command itself


NONE = {"tensorflow": "", "pytorch": ""}
GAUDI_3 = hl_smi_table("1.24.0", cards=2, name="HL-325L")


def test_driver_tools_and_cards_are_told_apart() -> None:
    facts = _read_facts(hl_smi_table("1.24.1", tools="1.24.0", cards=2, name="HL-325L"), "")
    assert facts == GaudiFacts("1.24.1", "1.24.0", ("HL-325L", "HL-325L"), "hl-smi")
    assert _read_facts("", "") == GaudiFacts()
    assert _read_facts("Failed to initialize the library\n", "Failed to load libhlml\n") == GaudiFacts()


def test_the_drivers_of_the_network_are_not_taken_for_the_driver() -> None:
    lines = GAUDI_3.splitlines()
    network = next(line for line in lines if "Nic Driver" in line)
    first = [lines[0], network.replace("1.24.0", "1.22.0"), *(line for line in lines[1:] if line != network)]
    assert _read_facts("\n".join(first), "").driver == "1.24.0"


@pytest.mark.parametrize(
    ("driver", "engine", "bridges", "verdict", "said"),
    [
        ("1.24.0", "pytorch", NONE, "ok", "driver and image are both 1.24.0"),
        ("1.24.2", "pytorch", NONE, "warning", "driver 1.24.2, but software 1.24.0 in the image for pytorch"),
        ("1.22.1", "pytorch", NONE, "failed", "or build the image on the vendor's of 1.22.1 (BASE_IMAGE)"),
        ("1.22.1", "pytorch", {**NONE, "pytorch": "1.22.1.6"}, "ok", "driver and image are both 1.22.1"),
        ("1.24.0", "auto", NONE, "ok", "driver and image are both 1.24.0"),
        ("1.14.0", "auto", NONE, "failed", "set training.engine to tensorflow, whose image has this release"),
        ("1.24.0", "tensorflow", NONE, "failed", "set training.engine to pytorch, whose image has this release"),
        ("1.14.0", "auto", {**NONE, "tensorflow": "1.14.0.493"}, "ok", "driver and image are both 1.14.0"),
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
    result = _check_driver(GaudiFacts(driver=driver), bridges, settings)  # type: ignore[arg-type]
    assert result.verdict == verdict
    assert said in str(result)
    assert bool(result.remedy) == (verdict != "ok")


def test_parts_of_several_releases_are_named() -> None:
    mixed = _check_software(GaudiFacts(tools="1.22.0"), {"tensorflow": "", "pytorch": "1.24.0.481"})
    assert (mixed.verdict, mixed.found) == ("warning", "hl-smi 1.22.0, habana-torch-plugin 1.24.0.481")
    same = _check_software(GaudiFacts(tools="1.24.0"), {"tensorflow": "", "pytorch": "1.24.1.9"})
    assert same.verdict == "ok"
    assert _check_software(GaudiFacts(), NONE).found == "none here; the images bring it"  # type: ignore[arg-type]


def doctor(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, with the programs and modules of `folder` before all others."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = f"{folder}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "gaudi_bert", "doctor", "--set", "resources.cards=8", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


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
    printed = json.loads(doctor(tmp_path, "--json", "--set", "training.engine=tensorflow").stdout)
    assert printed["gaudi"]["driver"] == printed["gaudi"]["tools"] == "1.24.0"
    assert printed["gaudi"]["cards"] == ["HL-325L", "HL-325L"]
    assert printed["engines"].keys() == {"tensorflow", "pytorch"}
    assert all(told.keys() == {"runs", "reason", "remedy"} for told in printed["engines"].values())
    failed = {finding["check"]: finding["remedy"] for finding in printed["findings"] if finding["verdict"] == "failed"}
    assert failed["driver"] == "set training.engine to pytorch, whose image has this release"


def test_without_hl_smi_the_command_asks_pyhlml(tmp_path: Path) -> None:
    put_pyhlml(tmp_path, "1.24.0-6bf9e3a", ["HL-225", "HL-225", "HL-225"])
    printed = json.loads(doctor(tmp_path, "--json").stdout)
    assert printed["gaudi"]["source"] == "pyhlml"
    assert (printed["gaudi"]["driver"], printed["gaudi"]["cards"]) == ("1.24.0", ["HL-225"] * 3)


def test_a_library_that_does_not_answer_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "pyhlml.py").write_text("print('Failed to load libhlml')\nraise OSError('no driver')\n")
    printed = json.loads(doctor(tmp_path, "--json").stdout)
    assert printed["gaudi"]["driver"] == printed["gaudi"]["source"] == ""


# --- which engine can run, and why the other cannot


BOTH = Packages(tensorflow="2.15.1", torch="2.13.0", transformers="5.23.0")
BRIDGE = {"tensorflow": "", "pytorch": "1.24.0.481"}


@pytest.mark.parametrize(
    ("packages", "on_cards", "verdict", "found"),
    [
        (BOTH, False, "ok", "tensorflow runs (TensorFlow 2.15.1); pytorch runs (PyTorch 2.13.0)"),
        (
            Packages((3, 12), torch="2.13.0", transformers="5.23.0"),
            False,
            "ok",
            "tensorflow does not run (TensorFlow 2.15 has no version for Python 3.12); pytorch runs (PyTorch 2.13.0)",
        ),
        (
            Packages(tensorflow="2.15.1"),
            False,
            "ok",
            "tensorflow runs (TensorFlow 2.15.1); pytorch does not run (PyTorch is not installed)",
        ),
        (Packages(torch="2.13.0"), False, "ok", "pytorch runs (PyTorch 2.13.0, BERT only: transformers is not installed)"),
        (
            Packages((3, 10), tensorflow="2.16.1"),
            False,
            "warning",
            "tensorflow does not run (TensorFlow is 2.16.1, and 2.15 is needed); pytorch does not run (PyTorch is not "
            "installed); estimate, pack, verify and import need neither",
        ),
        (
            BOTH,
            True,
            "warning",
            "tensorflow does not run (habana_frameworks.tensorflow is not installed, which the cards need); "
            "pytorch does not run (habana_frameworks.torch is not installed, which the cards need)",
        ),
        (
            Packages(torch="2.10.0", transformers="5.23.0", bridges=BRIDGE),
            True,
            "ok",
            "tensorflow does not run (TensorFlow is not installed); pytorch runs (PyTorch 2.10.0)",
        ),
    ],
)
def test_what_can_run_and_why_the_rest_cannot(packages: Packages, on_cards: bool, verdict: str, found: str) -> None:
    result = _check_engines(packages, load_pipeline(None), on_cards=on_cards)
    assert (result.check, result.verdict) == ("engines", verdict)
    assert found in result.found
    assert bool(result.remedy) == (verdict == "warning")
    assert "--on docker" in result.remedy or verdict == "ok"


@pytest.mark.parametrize(
    ("engine", "verdict", "remedy"),
    [("auto", "ok", ""), ("pytorch", "ok", ""), ("tensorflow", "warning", "to train by tensorflow: python3.11 -m venv")],
)
def test_an_engine_that_is_named_must_run(monkeypatch: pytest.MonkeyPatch, engine: str, verdict: str, remedy: str) -> None:
    monkeypatch.setattr("sys.executable", "python3.12")
    monkeypatch.setattr("gaudi_bert.common.errors.has_tensorflow", lambda: False)
    settings = load_pipeline(None, [f"training.engine={engine}"])
    result = _check_engines(Packages((3, 12), torch="2.13.0", transformers="5.23.0"), settings, on_cards=False)
    assert result.verdict == verdict
    assert result.remedy.startswith(remedy)


def test_on_cards_the_remedy_is_the_vendors_framework_not_that_of_a_cpu() -> None:
    for packages in (Packages((3, 12)), BOTH, Packages(bridges=BRIDGE)):
        (state,) = (state for state in _engine_states(packages, on_cards=True) if state.name == "pytorch")
        assert state.remedy == "install habana-torch-plugin of the driver's release, with the vendor's framework"
