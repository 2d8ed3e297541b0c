"""The checks of a machine, on recorded answers, and of an object store."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings, load_pipeline
from gaudi_bert.runners.doctor.checks import CheckResult, examine_store
from gaudi_bert.runners.doctor.host import HostAnswers, Packages, ask_host, check_host
from tests.builders.command_line import run_command
from tests.builders.machines import hl_smi_table
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


def test_a_server_as_the_vendor_wants_it_is_ready() -> None:
    assert wrong(check_host(SERVER, CARDS)) == {}


@pytest.mark.parametrize(
    ("changed", "check", "verdict", "said"),
    [
        ({"hl_smi": ""}, "driver", "failed", "install the Gaudi driver 1.14.0"),
        ({"hl_smi": hl_smi_table("1.15.1", tools="1.14.0")}, "driver", "failed", "driver 1.15.1, but software 1.14.0"),
        ({"hl_smi": hl_smi_table("1.14.0", cards=7)}, "cards", "warning", "the pipeline asks for 8; hl-smi lists 7"),
        ({"hl_smi": hl_smi_table("1.14.0", tools="1.16.2")}, "software", "warning", "hl-smi 1.16.2, habana-tensorflow 1.14"),
        (
            {"device_nodes": ("accel0", "accel1")},
            "cards",
            "failed",
            "2 device nodes (HL-225), the pipeline asks for 8",
        ),
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


def test_numa_balancing_does_no_harm_on_newer_kernels() -> None:
    answers = dataclasses.replace(SERVER, numa_balancing="1", kernel="6.8.0")
    assert wrong(check_host(answers, CARDS)) == {}


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
