"""One process, and launchers without a proper Horovod."""

from __future__ import annotations

import os
import sys
import types

import numpy as np
import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.launch import Launch, find_launch
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.engines.tensorflow.horovod import connect

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


def test_alone_nothing_travels() -> None:
    communicator = connect(SETTINGS, {})
    assert (communicator.rank, communicator.size, communicator.local_size, communicator.is_first) == (0, 1, 1, True)
    assert communicator.any_true(True)
    assert not communicator.any_true(False)
    arrays = {"one": np.ones(2, np.float32)}
    assert communicator.broadcast(arrays) is arrays
    np.testing.assert_array_equal(communicator.sum_array(np.arange(3)), [0.0, 1.0, 2.0])
    with communicator.watched(SETTINGS) as watched:
        assert watched is communicator


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_is_known_and_without_horovod_every_rank_of_several_says_so(monkeypatch, launcher: str) -> None:
    launch(monkeypatch, launcher, 0, 1)
    assert connect(SETTINGS, {}) == Communicator()
    for rank in range(2):
        launch(monkeypatch, launcher, rank, 2)
        monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
        assert find_launch() == Launch(launcher, rank, 2)
        with pytest.raises(InputError, match=f"rank {rank} of 2, started by {launcher}: .*make setup-horovod"):
            connect(SETTINGS, {})


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("x", "2"), ("", "")])
def test_nonsense_in_the_environment_is_named(rank: str, size: str) -> None:
    with pytest.raises(InputError, match=f"HOROVOD_RANK={rank}, HOROVOD_SIZE={size}"):
        find_launch({"HOROVOD_RANK": rank, "HOROVOD_SIZE": size})


def test_horovod_without_mpi_under_mpirun_and_one_that_cannot_connect_are_told(monkeypatch) -> None:
    """Each process would train on its own, and all of them write the same files."""
    launch(monkeypatch, "mpirun", 1, 4)
    with pytest.raises(InputError, match="rank 1 of 4, started by mpirun: Horovod reports rank 0 of 1"):
        connect(SETTINGS, {})

    def init() -> None:
        raise RuntimeError("Gloo connectFullMesh failed\nwith timeout")

    launch(monkeypatch, "mpirun", 1, 4, init=init)
    with pytest.raises(FailedError, match=r"\(Gloo connectFullMesh failed with timeout\)"):
        connect(SETTINGS, {})


def test_the_fusion_threshold_is_set_before_horovod_starts(monkeypatch) -> None:
    seen = []
    launch(monkeypatch, "horovodrun", 0, 2, init=lambda: seen.append(os.environ["HOROVOD_FUSION_THRESHOLD"]), size=lambda: 2)
    connect(TrainingSettings(fusion_bytes="16MiB"), {})
    assert seen == [str(16 * 2**20)]
