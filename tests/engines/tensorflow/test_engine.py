"""Devices: the order of the calls on Gaudi, and what is said where it is missing; one process, and launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import tensorflow as tf

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.launch import LauncherInfo, detect_launcher
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.engines.tensorflow import set_tensorflow_environment
from gaudi_bert.engines.tensorflow.engine import BFLOAT16_LIST, connect_processes, open_device

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


# --- one process, and launchers without a proper Horovod

SETTINGS = TrainingSettings()
LAUNCHERS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch) -> None:
    for name in (*sum(LAUNCHERS.values(), ()), "HOROVOD_FUSION_THRESHOLD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def launch(monkeypatch, launcher: str, number: int, processes: int, **changes) -> None:
    """Variables of a launcher, and a module like `horovod.tensorflow` that connects to nobody."""
    for name, value in zip(LAUNCHERS[launcher], (number, processes), strict=True):
        monkeypatch.setenv(name, str(value))
    module = types.ModuleType("horovod.tensorflow")
    vars(module).update({"init": lambda: None, "rank": lambda: 0, "size": lambda: 1, "local_size": lambda: 1, **changes})
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", module)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_is_known_and_without_horovod_a_rank_of_several_says_so(monkeypatch, launcher: str) -> None:
    launch(monkeypatch, launcher, 0, 1)
    assert connect_processes(SETTINGS, {}) == Communicator()
    launch(monkeypatch, launcher, 1, 2)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    assert detect_launcher() == LauncherInfo(launcher, 1, 2)
    with pytest.raises(InputError, match=f"rank 1 of 2, started by {launcher}: .*make setup-horovod"):
        connect_processes(SETTINGS, {})
    first, second = LAUNCHERS[launcher]
    for rank, size in (("2", "2"), ("x", "2")):
        with pytest.raises(InputError, match=f"{first}={rank}, {second}={size}"):
            detect_launcher({first: rank, second: size})


def test_horovod_without_mpi_under_mpirun_and_one_that_cannot_connect_are_told(monkeypatch) -> None:
    """Each process would train on its own, and all of them write the same files."""
    launch(monkeypatch, "mpirun", 1, 4)
    with pytest.raises(InputError, match="rank 1 of 4, started by mpirun: Horovod reports rank 0 of 1"):
        connect_processes(SETTINGS, {})

    def init() -> None:
        raise RuntimeError("Gloo connectFullMesh failed\nwith timeout")

    launch(monkeypatch, "mpirun", 1, 4, init=init)
    with pytest.raises(FailedError, match=r"\(Gloo connectFullMesh failed with timeout\)"):
        connect_processes(SETTINGS, {})


def test_the_fusion_threshold_is_set_before_horovod_starts(monkeypatch) -> None:
    seen = []
    launch(monkeypatch, "horovodrun", 0, 2, init=lambda: seen.append(os.environ["HOROVOD_FUSION_THRESHOLD"]), size=lambda: 2)
    connect_processes(TrainingSettings(fusion_bytes="16MiB"), {})
    assert seen == [str(16 * 2**20)]


# --- the variables that TensorFlow reads


def test_onednn_is_used_on_every_processor_unless_the_user_says_otherwise() -> None:
    unset: dict[str, str] = {}
    set_tensorflow_environment(unset)
    assert unset == {"TF_ENABLE_ONEDNN_OPTS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    chosen = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "1"}
    before = dict(chosen)
    set_tensorflow_environment(chosen)
    assert chosen == before


def test_on_gaudi_the_vendor_chooses_the_kernels(monkeypatch) -> None:
    stand_in(monkeypatch)
    environment: dict[str, str] = {}
    set_tensorflow_environment(environment)
    assert environment == {"TF_CPP_MIN_LOG_LEVEL": "3"}


def test_it_is_set_before_tensorflow_is_loaded() -> None:
    """The import is stopped where it comes to TensorFlow, which would read its variables there."""
    code = (
        "import importlib, os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tensorflow':\n"
        "            print(os.environ.get('TF_ENABLE_ONEDNN_OPTS'))\n"
        "            sys.exit()\n"
        "sys.meta_path.insert(0, Watch())\n"
        "importlib.import_module('gaudi_bert.engines.tensorflow.bert')\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["1"], done.stderr
