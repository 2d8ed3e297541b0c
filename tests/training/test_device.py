"""Devices: the order of the calls on Gaudi, and what is said where it is missing."""

from __future__ import annotations

import sys
import types

import pytest
import tensorflow as tf

from gaudi_bert.common.errors import InputError
from gaudi_bert.training.device import open_device


def stand_in(monkeypatch, calls: list[str], cards: int = 1, error: Exception | None = None) -> None:
    """A `habana_frameworks` that writes down how it is called."""

    def load_habana_module() -> None:
        calls.append("load_habana_module")
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
    monkeypatch.delenv("TF_BF16_CONVERSION", raising=False)


def test_without_the_software_auto_is_the_cpu_and_hpu_says_what_to_install() -> None:
    assert open_device("auto", "float32").kind == "cpu"
    with pytest.raises(InputError, match="habana_frameworks is not installed; use the Gaudi training image"):
        open_device("hpu", "float32")


def test_on_gaudi_the_module_is_loaded_before_the_card_is_looked_for(monkeypatch) -> None:
    calls: list[str] = []
    stand_in(monkeypatch, calls)
    device = open_device("auto", "float32")
    assert (device.kind, device.name) == ("hpu", "/device:HPU:0")
    assert calls == ["load_habana_module", "list HPU"]


def test_bfloat16_is_switched_by_the_environment_on_gaudi_and_by_the_model_on_a_cpu(monkeypatch) -> None:
    assert open_device("cpu", "bfloat16").compute_dtype == "bfloat16"
    stand_in(monkeypatch, [])
    device = open_device("hpu", "bfloat16")
    assert device.compute_dtype == "float32"
    import os

    assert os.environ["TF_BF16_CONVERSION"] == "1"
    monkeypatch.delenv("TF_BF16_CONVERSION")


def test_no_card_and_a_failing_driver_are_told_with_their_remedy(monkeypatch) -> None:
    stand_in(monkeypatch, [], cards=0)
    with pytest.raises(InputError, match="no Gaudi card is visible; check hl-smi"):
        open_device("hpu", "float32")
    stand_in(monkeypatch, [], error=RuntimeError("synStatus\n 26"))
    with pytest.raises(InputError, match=r"load_habana_module\(\) failed \(synStatus 26\); check the driver"):
        open_device("hpu", "float32")


def test_threads_that_come_too_late_are_an_error() -> None:
    tf.constant(1.0)
    with pytest.raises(InputError, match=r"training.threads = 3"):
        open_device("cpu", "float32", threads=3)
