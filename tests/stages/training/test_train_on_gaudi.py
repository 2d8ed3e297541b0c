"""Stage train with stand-ins for Gaudi's and Horovod's packages: the order of the calls, and taking up runs elsewhere."""

from __future__ import annotations

import io
import os
import signal
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gaudi_bert.common.errors import StoppedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings, pipeline_from_mapping
from gaudi_bert.model.bert import BertForPretraining
from gaudi_bert.stages.training.train import train
from gaudi_bert.training.checkpoint import newest_settings
from gaudi_bert.training.distributed.horovod import HorovodCommunicator
from tests.builders import training_data as data

MODEL = {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 5}
TRAINING = {"updates": 3, "warmup_updates": 0, "global_batch_sequences": 16, "micro_batch_packs": 8, "log_every_updates": 1}


def settings(device: str) -> PipelineSettings:
    return pipeline_from_mapping({"model": MODEL, "training": {**TRAINING, "device": device}}, "test")


class StopAfterOne(Reporter):
    """Sends this process SIGTERM when it hears of the first update."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith("train: update 1/"):
            os.kill(os.getpid(), signal.SIGTERM)


class EnoughError(Exception):
    """What was to be seen has been seen."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return data.write_packed(tmp_path_factory.mktemp("data") / "train", data.make_packs(12))


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What was called of `habana_frameworks`, which has one card."""
    made: list[str] = []
    package, module = types.ModuleType("habana_frameworks"), types.ModuleType("habana_frameworks.tensorflow")
    module.load_habana_module = lambda: made.append("load_habana_module")
    package.tensorflow = module
    monkeypatch.setitem(sys.modules, "habana_frameworks", package)
    monkeypatch.setitem(sys.modules, "habana_frameworks.tensorflow", module)
    monkeypatch.setenv("TF_HCCL_MEMORY_ALLOWANCE_MB", "1536")
    physical = tf.config.list_physical_devices
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["card"] if kind == "HPU" else physical(kind))
    return made


def test_processes_are_connected_then_the_card_is_loaded_then_the_model_is_made(
    monkeypatch, calls, packed, tmp_path
) -> None:
    horovod = types.ModuleType("horovod.tensorflow")
    horovod.init = lambda: calls.append("hvd.init")
    horovod.rank, horovod.size, horovod.local_size = (lambda: 0), (lambda: 2), (lambda: 2)
    horovod.Sum = "sum"
    horovod.allreduce = lambda values, **_: tf.convert_to_tensor(values)
    monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", horovod)
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setattr(HorovodCommunicator, "watched", lambda self, _: nullcontext(self))
    monkeypatch.setattr(HorovodCommunicator, "sum_array", lambda self, values: np.asarray(values, np.float64))

    def make(self, *_, **options) -> None:
        calls.append(f"the model, compiled={options['compiled']}, {options['compute_dtype']}")
        raise EnoughError

    monkeypatch.setattr(BertForPretraining, "__init__", make)
    with pytest.raises(EnoughError):
        train(settings("hpu"), packed, None, tmp_path / "run", reporter=Reporter(quiet=True))
    assert calls == ["hvd.init", "load_habana_module", "the model, compiled=False, float32"]


def stop_after_one(device: str, packed: Path, out: Path) -> None:
    with pytest.raises(StoppedError):
        train(settings(device), packed, None, out, reporter=StopAfterOne())


def compiled_at_the_end(out: Path) -> bool:
    stored = newest_settings(out / "checkpoints")
    assert stored is not None
    return stored["compiled_kernels"]


def test_a_run_that_began_on_gaudi_stays_plain_on_a_cpu(calls, packed, tmp_path) -> None:
    stop_after_one("hpu", packed, tmp_path / "run")
    assert calls == ["load_habana_module"]
    train(settings("cpu"), packed, None, tmp_path / "run", reporter=Reporter(quiet=True), resume=True)
    assert compiled_at_the_end(tmp_path / "run") is False


@pytest.mark.usefixtures("calls")
def test_a_run_that_began_on_a_cpu_says_what_changes_on_gaudi(packed, tmp_path) -> None:
    stop_after_one("cpu", packed, tmp_path / "run")
    assert compiled_at_the_end(tmp_path / "run") is True
    said = io.StringIO()
    train(settings("hpu"), packed, None, tmp_path / "run", reporter=Reporter(said), resume=True)
    assert "note: the run began with kernels compiled for a CPU; from here on dropout draws other places" in said.getvalue()
    assert compiled_at_the_end(tmp_path / "run") is False
