"""Devices: the order of the calls on Gaudi, its variables, and what is said where it is missing."""

from __future__ import annotations

import functools
import json
import os
import sys
import types

import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import GaudiSettings, TrainingSettings
from gaudi_bert.engines.tensorflow.engine import BFLOAT16_LIST, open_device

VARIABLES = (
    "TF_BF16_CONVERSION",
    "TF_RECIPE_CACHE_PATH",
    "HABANA_INITIAL_WORKSPACE_SIZE_MB",
    "TF_PRELIMINARY_CLUSTER_SIZE",
    "TF_HCCL_MEMORY_ALLOWANCE_MB",
    "TF_CPU_RUNTIME_FALLBACK",
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """What the device sets is gone after each test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def stand_in(monkeypatch, calls: list[str], cards: int = 1, error: Exception | None = None) -> None:
    """A `habana_frameworks` that writes down how it is called."""

    def load_habana_module() -> None:
        calls.append("load_habana_module")
        calls.extend(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
        if error is not None:
            raise error

    def list_physical_devices(kind: str) -> list[str]:
        calls.append(f"list {kind}")
        return ["card"] * cards

    package, module = types.ModuleType("habana_frameworks"), types.ModuleType("habana_frameworks.tensorflow")
    module.load_habana_module = load_habana_module
    package.tensorflow = module
    monkeypatch.setitem(sys.modules, "habana_frameworks", package)
    monkeypatch.setitem(sys.modules, "habana_frameworks.tensorflow", module)
    monkeypatch.setattr(tf.config, "list_physical_devices", list_physical_devices)


def test_without_the_software_auto_is_the_cpu_and_hpu_says_what_to_install() -> None:
    device = open_device(TrainingSettings(device="auto"))
    assert (device.kind, device.compiles) == ("cpu", True)
    assert not any(name in os.environ for name in VARIABLES)
    with pytest.raises(InputError, match="habana_frameworks is not installed; use the Gaudi training image"):
        open_device(TrainingSettings(device="hpu"))


def test_on_gaudi_variables_come_before_the_module_and_the_module_before_the_card(monkeypatch) -> None:
    calls: list[str] = []
    stand_in(monkeypatch, calls)
    device = open_device(TrainingSettings(device="auto"))
    assert (device.kind, device.name, device.compiles, device.notes) == ("hpu", "/device:HPU:0", False, ())
    assert calls == ["load_habana_module", "TF_HCCL_MEMORY_ALLOWANCE_MB=1536", "list HPU"]


def test_every_setting_becomes_its_variable(monkeypatch) -> None:
    calls: list[str] = []
    stand_in(monkeypatch, calls)
    settings = GaudiSettings(
        recipe_cache="/tmp/recipes", initial_workspace_MB=4600, cluster_size=1000, hccl_memory_MB=0, cpu_fallback=False
    )
    open_device(TrainingSettings(device="hpu", precision="bfloat16"), settings)
    assert calls[1:-1] == [
        f"TF_BF16_CONVERSION={BFLOAT16_LIST}",
        "TF_RECIPE_CACHE_PATH=/tmp/recipes",
        "HABANA_INITIAL_WORKSPACE_SIZE_MB=4600",
        "TF_PRELIMINARY_CLUSTER_SIZE=1000",
        "TF_HCCL_MEMORY_ALLOWANCE_MB=0",
        "TF_CPU_RUNTIME_FALLBACK=forbid",
    ]


def test_what_the_environment_sets_stays_and_is_said(monkeypatch) -> None:
    calls: list[str] = []
    stand_in(monkeypatch, calls)
    monkeypatch.setenv("TF_BF16_CONVERSION", "basic")
    device = open_device(TrainingSettings(device="hpu", precision="bfloat16"))
    assert "TF_BF16_CONVERSION=basic" in calls
    assert device.notes == (
        f"note: TF_BF16_CONVERSION=basic is set in the environment and stays (the settings say {BFLOAT16_LIST})",
    )


def test_bfloat16_is_the_runtime_on_gaudi_and_the_model_on_a_cpu_never_both(monkeypatch) -> None:
    assert open_device(TrainingSettings(device="cpu", precision="bfloat16")).compute_dtype == "bfloat16"
    assert "TF_BF16_CONVERSION" not in os.environ
    stand_in(monkeypatch, [])
    assert open_device(TrainingSettings(device="hpu", precision="bfloat16")).compute_dtype == "float32"
    assert os.environ["TF_BF16_CONVERSION"] == str(BFLOAT16_LIST)


def test_no_card_and_a_failing_driver_are_told_with_their_remedy(monkeypatch) -> None:
    stand_in(monkeypatch, [], cards=0)
    with pytest.raises(InputError, match="no Gaudi card is visible; check hl-smi"):
        open_device(TrainingSettings(device="hpu"))
    assert open_device(TrainingSettings(device="auto")).kind == "cpu"
    stand_in(monkeypatch, [], error=RuntimeError("synStatus\n 26"))
    with pytest.raises(InputError, match=r"load_habana_module\(\) failed \(synStatus 26\); check the driver"):
        open_device(TrainingSettings(device="hpu"))


def test_a_list_of_ones_own_is_checked_before_the_runtime_passes_over_it(tmp_path, monkeypatch) -> None:
    path = tmp_path / "mine.json"
    stand_in(monkeypatch, [])
    opened = functools.partial(
        open_device, TrainingSettings(device="hpu", precision="bfloat16"), GaudiSettings(bfloat16_list=str(path))
    )
    with pytest.raises(InputError, match="cannot read"):
        opened()
    content = json.loads(BFLOAT16_LIST.read_text())
    path.write_text(json.dumps(content))
    opened()
    assert os.environ.pop("TF_BF16_CONVERSION") == str(path)
    for key, value, message in [
        ("allow_list", [], "unknown key `allow_list`; write it as bfloat16.json"),
        ("allowlist", [["MatMul"]], r"`allowlist\.0` = \['MatMul'\]"),
        ("convertible_exceptions", ["MatMul"], r"`convertible_exceptions\.0` = 'MatMul'"),
    ]:
        path.write_text(json.dumps({**content, key: value}))
        with pytest.raises(InputError, match=message):
            opened()


def test_threads_that_come_too_late_are_an_error() -> None:
    tf.constant(1.0)
    with pytest.raises(InputError, match=r"training.threads = 3"):
        open_device(TrainingSettings(device="cpu"), threads=3)
