"""One process, launchers without a proper Horovod, and the watchdog: who is to blame for each kind of standstill."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.launch import Launch, find_launch
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.protocol import Communicator
from gaudi_bert.engines.tensorflow.horovod import connect
from gaudi_bert.engines.watchdog import (
    ConnectedProcess,
    Member,
    Watchdog,
    WatchServer,
    check_members,
    connect_to_server,
    own_addresses,
)

SETTINGS = TrainingSettings()
LAUNCHERS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch) -> None:
    for names in LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)


def launch(monkeypatch, launcher: str, rank: int, size: int) -> None:
    for name, value in zip(LAUNCHERS[launcher], (rank, size), strict=True):
        monkeypatch.setenv(name, str(value))


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
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    launch(monkeypatch, launcher, 0, 1)
    assert connect(SETTINGS, {}) == Communicator()
    for rank in range(2):
        launch(monkeypatch, launcher, rank, 2)
        assert find_launch() == Launch(launcher, rank, 2)
        message = f"rank {rank} of 2, started by {launcher}: several processes need Horovod.*make setup-horovod"
        with pytest.raises(InputError, match=message) as raised:
            connect(SETTINGS, {})
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("x", "2"), ("", "")])
def test_nonsense_in_the_environment_is_named(rank: str, size: str) -> None:
    with pytest.raises(InputError, match=f"HOROVOD_RANK={rank} and HOROVOD_SIZE={size} are not 0 <= rank < size"):
        find_launch({"HOROVOD_RANK": rank, "HOROVOD_SIZE": size})


def stand_in(**changes) -> types.ModuleType:
    """A module like `horovod.tensorflow` that records nothing and connects to nobody."""
    module = types.ModuleType("horovod.tensorflow")
    members = {"init": lambda: None, "rank": lambda: 0, "size": lambda: 1, "local_size": lambda: 1, **changes}
    for name, member in members.items():
        setattr(module, name, member)
    return module


def test_horovod_without_mpi_under_mpirun_is_told(monkeypatch) -> None:
    """Each process would train on its own, and all of them write the same files."""
    launch(monkeypatch, "mpirun", 1, 4)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", stand_in())
    with pytest.raises(InputError, match=r"rank 1 of 4, started by mpirun: Horovod reports rank 0 of 1; .*without MPI"):
        connect(SETTINGS, {})


def test_horovod_that_cannot_connect_is_one_line(monkeypatch) -> None:
    def init() -> None:
        raise RuntimeError("Gloo connectFullMesh failed\nwith timeout")

    launch(monkeypatch, "horovodrun", 0, 2)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", stand_in(init=init))
    with pytest.raises(FailedError, match=r"cannot connect \(Gloo connectFullMesh failed with timeout\); start all ranks"):
        connect(SETTINGS, {})


def test_the_fusion_threshold_is_set_before_horovod_starts(monkeypatch) -> None:
    seen = {}
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)

    def init() -> None:
        seen["threshold"] = os.environ["HOROVOD_FUSION_THRESHOLD"]

    launch(monkeypatch, "horovodrun", 0, 2)
    module = stand_in(init=init, size=lambda: 2, Sum=1, allreduce=lambda tensor, **_: tensor)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", module)
    connect(TrainingSettings(fusion_bytes="16MiB"), {})
    assert seen["threshold"] == str(16 * 2**20)
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD")


# --- what all processes must have alike


@pytest.mark.parametrize(("size", "others"), [(2, ()), (2, (1,)), (3, (2,)), (5, (4, 1, 3)), (7, (1, 2, 3, 4, 5, 6))])
def test_all_end_alike_and_name_the_first_rank_that_runs_something_else(size: int, others: tuple[int, ...]) -> None:
    shares: dict[int, np.ndarray] = {}
    meeting = threading.Barrier(size)

    class OneThread(ConnectedProcess):
        def sum_array(self, values: np.ndarray) -> np.ndarray:
            shares[self.rank] = np.asarray(values, np.float64)
            meeting.wait(20)
            total = sum(shares.values())
            meeting.wait(20)
            return total

    def end_of(rank: int) -> str:
        facts = {"gaudi-bert": "1.0", "training.updates": 7 + 100 * rank * (rank in others)}
        try:
            OneThread(rank, size, facts=facts).compare()
        except InputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(size) as pool:
        (end,) = set(pool.map(end_of, range(size)))
    host, first = socket.gethostname(), min(others, default=0)
    said = f"rank {first} ({host}) has training.updates = {7 + 100 * first}, rank 0 ({host}) has 7; start all ranks"
    assert end.startswith(said) if others else end == ""


# --- the watchdog: who is to blame for each kind of standstill, and that every process hears it, over real sockets

STALL = 10.0
ROOT = Path(__file__).resolve().parents[3]


def member(
    rank: int, *, last_heartbeat: float = 100.0, last_progress: float = 100.0, arrivals: int = 7, **changes
) -> Member:
    state = {"slow": False, **changes}
    return Member(rank, f"host-{rank}, process 1", last_heartbeat, last_progress, arrivals, activity="update 4", **state)


STUCK = "rank 1 (host-1, process 1) in update 4: no sign of work for 11 s, and the other processes wait for it"
TWO_STUCK = "rank 1 (host-1, process 1) in update 4, rank 2 (host-2, process 1) in update 4: no sign of work"
SILENT = "rank 1 (host-1, process 1) has sent no heartbeat for 12 s in update 4: its process is stopped"
VERDICTS: dict[str, list[tuple[list[Member], str | None]]] = {
    "processes that move are not touched": [
        ([], None),
        ([member(0), member(1, arrivals=8)], None),
        ([member(0, last_progress=91), member(1, arrivals=8, last_progress=50)], None),
    ],
    "who has reached less and shows no work is stuck": [
        ([member(0, arrivals=8, last_progress=80), member(1, last_progress=89), member(2, arrivals=8)], STUCK)
    ],
    "who is behind but shows work is waited for": [
        ([member(0, arrivals=8, last_progress=10), member(1, last_progress=95)], None)
    ],
    "two that are stuck are both named": [
        ([member(0, arrivals=8), member(1, last_progress=80), member(2, last_progress=70)], TWO_STUCK)
    ],
    "slow work has three times as long": [
        ([member(0, arrivals=8), member(1, last_progress=71, slow=True)], None),
        ([member(0, arrivals=8), member(1, last_progress=69, slow=True)], "rank 1 ("),
    ],
    "all at one position for too long is the network": [
        ([member(0, last_progress=89), member(1, last_progress=91)], None),
        ([member(0, last_progress=89), member(1, last_progress=88)], "no process has moved for 11 s: rank 0 ("),
        ([member(0, last_progress=89), member(1, last_progress=88, slow=True)], None),
    ],
    "who sends no heartbeat is named before who waits": [
        ([member(0, last_progress=80), member(1, last_heartbeat=88, last_progress=88)], SILENT)
    ],
    "who is lost is named": [([member(0), member(1, state="lost")], "rank 1 (host-1, process 1) is lost in update 4")],
    "who is done is not waited for": [([member(0, state="done", last_heartbeat=0, last_progress=0), member(1)], None)],
}


@pytest.mark.parametrize("rule", VERDICTS)
def test_who_is_to_blame(rule: str) -> None:
    for members, begin in VERDICTS[rule]:
        verdict = check_members(members, 100.0, STALL)
        assert (verdict is None) if begin is None else verdict.text.startswith(begin)


def test_a_failure_comes_before_the_loss_that_it_causes() -> None:
    failed = member(1, state="failed", reason="disk full", exit_code=2)
    verdict = check_members([member(0, state="lost"), failed], 100.0, STALL)
    assert (verdict.text, verdict.exit_code) == ("rank 1 (host-1, process 1) failed: disk full", 2)


class Group:
    """A server and its processes, all in this one; what would end a process is put into `ends`."""

    def __init__(self, size: int, stall_seconds: float = 60.0) -> None:
        self.server = WatchServer(("127.0.0.1", 0), size, "secret", stall_seconds)
        self.port = self.server.server_address[1]
        self.ends: queue.Queue[tuple[int, str, int]] = queue.Queue()
        self.connections = [connect_to_server(["127.0.0.1"], self.port) for _ in range(size)]
        self.members = [
            Watchdog(connection, "secret", rank, stall_seconds, self.server if rank == 0 else None, end=self._end(rank))
            for rank, connection in enumerate(self.connections)
        ]

    def _end(self, rank: int):
        return lambda line, exit_code: self.ends.put((rank, line, exit_code))

    def ended(self, count: int) -> dict[int, tuple[str, int]]:
        ends = [self.ends.get(timeout=20) for _ in range(count)]
        return {rank: (line, code) for rank, line, code in ends}


def test_those_who_are_done_leave_in_any_order() -> None:
    group = Group(3)
    for rank in (1, 2, 0):
        group.members[rank].arrive()
        group.members[rank].leave()
    assert group.ends.empty()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_ends_all_others_with_its_exit_code(failing: int) -> None:
    group = Group(3)
    group.members[failing].fail("data.tfrecord: record 3 is damaged", 2)
    ended = group.ended(2)
    assert set(ended) == {0, 1, 2} - {failing}
    for rank, (line, code) in ended.items():
        assert line.startswith(f"rank {rank} aborts: rank {failing} (")
        assert line.endswith("failed: data.tfrecord: record 3 is damaged")
        assert code == 2


def test_a_broken_connection_ends_all_others_at_once() -> None:
    group = Group(3)
    group.connections[2].shutdown(socket.SHUT_RDWR)
    ended = group.ended(3)
    for rank in (0, 1):
        assert "rank 2 (" in ended[rank][0]
        assert "is lost" in ended[rank][0]
        assert ended[rank][1] == 1


def test_when_rank_0_is_lost_the_others_end() -> None:
    group = Group(3)
    for connection in group.connections:
        connection.shutdown(socket.SHUT_RDWR)
    assert group.ended(3)[1] == ("rank 1 aborts: rank 0 is lost: its process has ended or was killed", 1)


@pytest.mark.parametrize(("kind", "last_words"), [("stops", "asked to stop"), ("hangs", "has ended")])
def test_a_process_ends_with_its_launcher(kind: str, last_words: str) -> None:
    """The launcher is killed; the pipe closes when the process that it started has ended too."""
    command = [sys.executable, "-m", "tests.builders.launched", kind]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        assert launcher.stdout is not None
        lines = iter(launcher.stdout)
        assert any(line == "ready\n" for line in lines)
        launcher.kill()
        said = list(lines)
    assert "asked to stop\n" in said
    assert last_words in said[-1]


def test_a_stranger_is_not_heard() -> None:
    group = Group(1)
    for words in (b'{"token": "wrong", "rank": 0, "name": "x"}\n', b"GET / HTTP/1.0\n\n", b"[]\n"):
        with socket.create_connection(("127.0.0.1", group.port)) as stranger:
            stranger.sendall(words)
            assert stranger.recv(100) == b""
    group.members[0].leave()
    assert group.ends.empty()


def test_a_server_that_cannot_be_reached_is_an_error_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(FailedError, match=rf"rank 0 does not answer at port {port} of 127.0.0.1; open that port"):
        connect_to_server(["127.0.0.1"], port)
    assert own_addresses()[-1] == socket.gethostname()
