"""The watchdog: who is to blame for each kind of standstill, and that every process hears it, over real sockets."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_bert.common.errors import FailedError
from gaudi_bert.training.distributed.watch_server import Member, WatchServer, judge
from gaudi_bert.training.distributed.watchdog import Watchdog, connect_to_server, own_addresses

STALL = 10.0
ROOT = Path(__file__).resolve().parents[3]


def member(rank: int, *, heard: float = 100.0, moved: float = 100.0, arrivals: int = 7, **changes) -> Member:
    state = {"slow": False, **changes}
    return Member(rank, f"host-{rank}, process 1", heard, moved, arrivals, place="update 4", **state)


def verdict(*members: Member, now: float = 100.0) -> str | None:
    found = judge(members, now, STALL)
    return found.text if found is not None else None


def test_processes_that_move_are_left_alone() -> None:
    assert verdict() is None
    assert verdict(member(0), member(1, arrivals=8)) is None
    assert verdict(member(0, moved=91), member(1, arrivals=8, moved=50)) is None


def test_who_has_reached_less_and_shows_no_work_is_stuck() -> None:
    text = verdict(member(0, arrivals=8, moved=80), member(1, moved=89), member(2, arrivals=8))
    assert text == "rank 1 (host-1, process 1) in update 4: no sign of work for 11 s, and the other processes wait for it"


def test_who_is_behind_but_shows_work_is_waited_for() -> None:
    assert verdict(member(0, arrivals=8, moved=10), member(1, moved=95)) is None


def test_two_that_are_stuck_are_both_named() -> None:
    text = verdict(member(0, arrivals=8), member(1, moved=80), member(2, moved=70))
    assert text.startswith("rank 1 (host-1, process 1) in update 4, rank 2 (host-2, process 1) in update 4: no sign of work")


def test_slow_work_has_three_times_as_long() -> None:
    assert verdict(member(0, arrivals=8), member(1, moved=71, slow=True)) is None
    assert verdict(member(0, arrivals=8), member(1, moved=69, slow=True)).startswith("rank 1 (")


def test_all_at_one_place_for_too_long_is_the_network() -> None:
    assert verdict(member(0, moved=89), member(1, moved=91)) is None
    assert verdict(member(0, moved=89), member(1, moved=88)).startswith("no process has moved for 11 s: rank 0 (")
    assert verdict(member(0, moved=89), member(1, moved=88, slow=True)) is None


def test_who_says_nothing_is_named_before_who_waits() -> None:
    text = verdict(member(0, moved=80), member(1, heard=88, moved=88))
    assert text.startswith("rank 1 (host-1, process 1) has said nothing for 12 s in update 4: its process is stopped")


def test_a_failure_comes_before_the_loss_that_it_causes() -> None:
    failed = member(1, state="failed", reason="disk full", exit_code=2)
    found = judge([member(0, state="lost"), failed], 100.0, STALL)
    assert (found.text, found.exit_code) == ("rank 1 (host-1, process 1) failed: disk full", 2)
    assert verdict(member(0), member(1, state="lost")).startswith("rank 1 (host-1, process 1) is lost in update 4")


def test_who_has_left_is_not_waited_for() -> None:
    assert verdict(member(0, state="left", heard=0, moved=0), member(1)) is None


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
        found = [self.ends.get(timeout=20) for _ in range(count)]
        return {rank: (line, code) for rank, line, code in found}


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
        assert line.startswith(f"rank {rank} ends with the run: rank {failing} (")
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
    assert group.ended(3)[1] == ("rank 1 ends with the run: rank 0 is lost: its process has ended or was killed", 1)


def test_one_that_stands_still_is_named_to_itself_too() -> None:
    group = Group(2, stall_seconds=3.0)
    group.members[0].arrive()
    for each in group.members:
        each.note("update 9", slow=False)
    for line, code in group.ended(2).values():
        assert "in update 9: no sign of work for" in line
        assert "rank 1 (" in line
        assert code == 1


@pytest.mark.parametrize(("kind", "last_words"), [("stops", "asked to stop"), ("hangs", "has ended")])
def test_a_process_ends_with_its_launcher(kind: str, last_words: str) -> None:
    """The launcher is killed; the pipe closes when the process that it started has ended too."""
    command = [sys.executable, "-m", "tests.builders.orphan", kind]
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


def test_this_host_has_a_name() -> None:
    assert own_addresses()[-1] == socket.gethostname()
