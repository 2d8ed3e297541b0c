"""Devices: the order of the calls on Gaudi, its variables, and what is said where it is missing."""

from __future__ import annotations

import os
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.tensorflow.engine import BFLOAT16_LIST, open_device

VARIABLES = ("TF_HCCL_MEMORY_ALLOWANCE_MB", "TF_BF16_CONVERSION")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """What the device sets is gone after each test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def stand_in(monkeypatch, cards: int = 1, error: Exception | None = None) -> list[str]:
    """How a `habana_frameworks` in place of the vendor's is called."""
    calls: list[str] = []

    def load_habana_module() -> None:
        calls.append("load_habana_module")
        calls.extend(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
        if error is not None:
            raise error

    physical = tf.config.list_physical_devices

    def list_physical_devices(kind: str | None = None) -> list[str]:
        if kind != "HPU":
            return physical(kind)
        calls.append("list HPU")
        return ["card"] * cards

    package, module = types.ModuleType("habana_frameworks"), types.ModuleType("habana_frameworks.tensorflow")
    module.load_habana_module = load_habana_module
    package.tensorflow = module
    package.__spec__, package.__path__ = ModuleSpec("habana_frameworks", None), []  # as of a package that is there
    monkeypatch.setitem(sys.modules, "habana_frameworks", package)
    monkeypatch.setitem(sys.modules, "habana_frameworks.tensorflow", module)
    monkeypatch.setattr(tf.config, "list_physical_devices", list_physical_devices)
    return calls


def test_without_the_software_auto_is_the_cpu_on_which_the_model_converts_and_hpu_is_refused() -> None:
    device = open_device(TrainingSettings(device="auto", precision="bfloat16"))
    assert (device.kind, device.compiles, device.compute_dtype) == ("cpu", True, "bfloat16")
    assert not any(name in os.environ for name in VARIABLES)
    with pytest.raises(InputError, match="habana_frameworks"):
        open_device(TrainingSettings(device="hpu"))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_on_gaudi_variables_come_before_the_module_and_the_module_before_the_card(monkeypatch, precision: str) -> None:
    """What converts to bfloat16 is the runtime, and never the model too."""
    calls = stand_in(monkeypatch)
    device = open_device(TrainingSettings(device="auto", precision=precision))
    assert (device.kind, device.name, device.compiles, device.notes) == ("hpu", "/device:HPU:0", False, ())
    assert device.compute_dtype == "float32"
    lists = [f"TF_BF16_CONVERSION={BFLOAT16_LIST}"] if precision == "bfloat16" else []
    assert calls == ["load_habana_module", "TF_HCCL_MEMORY_ALLOWANCE_MB=1536", *lists, "list HPU"]


def test_what_the_environment_sets_stays_and_is_said(monkeypatch) -> None:
    monkeypatch.setenv("TF_BF16_CONVERSION", "basic")
    calls = stand_in(monkeypatch)
    (note,) = open_device(TrainingSettings(device="hpu", precision="bfloat16")).notes
    assert "TF_BF16_CONVERSION=basic" in calls
    assert "TF_BF16_CONVERSION=basic" in note
    assert str(BFLOAT16_LIST) in note


def test_no_card_and_a_failing_driver_are_told_with_their_remedy(monkeypatch) -> None:
    stand_in(monkeypatch, cards=0)
    with pytest.raises(InputError, match="hl-smi"):
        open_device(TrainingSettings(device="hpu"))
    assert open_device(TrainingSettings(device="auto")).kind == "cpu"
    stand_in(monkeypatch, error=RuntimeError("synStatus\n 26"))
    with pytest.raises(InputError, match=r"\(synStatus 26\)"):
        open_device(TrainingSettings(device="hpu"))


def test_threads_that_come_too_late_are_an_error() -> None:
    tf.constant(1.0)
    with pytest.raises(InputError, match=r"training.threads = 3"):
        open_device(TrainingSettings(device="cpu"), threads=3)
