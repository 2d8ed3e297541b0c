"""A process of several that is killed or stopped is named by all others, in real processes."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_bert.common.launch import find_free_port, torch_environment
from gaudi_bert.engines.failure_detector import FailureDetector, Peer, _describe_failures, summarize_gloo_error

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()
SILENT = "not responding because the process is suspended or its node is lost"
LOOP = """
import os, signal, sys, time
import numpy as np
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.engines.pytorch import distributed
end, victims = sys.argv[1], json.loads(sys.argv[2])
settings = load_pipeline(None, ["training.stall_seconds=3", "training.log_every_updates=1"]).training
process = distributed.connect_processes("cpu", settings, {})
try:
    with process.watch_processes_during_block(settings) as own:
        for update in range(1, 2000):
            own.record_activity(f"update {update}")
            if update == 5 and own.rank in victims:
                if end == "SLEEP":
                    time.sleep(60)
                os.kill(os.getpid(), signal.Signals[end])
            own.sum_array(np.ones(1))
except GaudiBertError as error:
    print(f"error: {error}", file=sys.stderr)
    os._exit(error.exit_code)
"""


def ends_of(size: int, end: str, victims: list[int]) -> dict[int, tuple[int, str]]:
    """The exit code and the last words of each of `size` processes that is none of the `victims`."""
    port, code = find_free_port(), f"import json{LOOP}"
    processes = {}
    for rank in range(size):
        variables = torch_environment(rank, size, processes_per_host=size, address="127.0.0.1", port=port)
        environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-c", code, end, json.dumps(victims)]
        processes[rank] = subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    ends = {}
    for rank, process in processes.items():
        if rank not in victims:
            _, said = process.communicate(timeout=120)
            ends[rank] = (process.returncode, said)
    for rank in victims:
        processes[rank].kill()
        processes[rank].communicate()
    return ends


@pytest.mark.parametrize(
    ("size", "end", "victims", "reason"),
    [
        (4, "SIGKILL", [2], f"rank 2 ({HOST}) is lost because the process has ended"),
        (4, "SIGKILL", [0], f"rank 0 ({HOST}) is lost because the process has ended"),
        (4, "SIGSTOP", [1], f"rank 1 ({HOST}) is {SILENT}"),
        (
            3,
            "SIGSTOP",
            [0, 2],
            f"rank 0 ({HOST}), rank 2 ({HOST}) are {SILENT}",
        ),
        (3, "SLEEP", [1], f"rank 1 ({HOST}) has been busy with update 5 for N s"),
    ],
    ids=["one of four killed", "first killed", "one of four stopped", "two stopped", "asleep"],
)
@pytest.mark.slow
def test_every_other_process_names_the_one_that_is_lost_or_silent(
    size: int, end: str, victims: list[int], reason: str
) -> None:
    pytest.importorskip("torch")
    ends = ends_of(size, end, victims)
    assert set(ends) == set(range(size)) - set(victims)
    for rank, (code, said) in ends.items():
        (line,) = (line for line in said.splitlines() if line.startswith("error: "))
        told = re.sub(r"for \d+ s", "for N s", line)
        assert (code, told) == (
            1,
            f"error: rank {rank} of {size} aborts during update 5: {reason}; run the same command again to resume",
        )
        assert "GLHF" not in said


@pytest.fixture
def listening(request: pytest.FixtureRequest) -> Callable[..., FailureDetector]:
    """Opens a failure detector of a rank, which answers until the test ends."""

    def listen(rank: int, waits: bool = True) -> FailureDetector:
        listener = socket.create_server(("127.0.0.1", 0))
        state = {"waits": waits, "activity": "update 3", "seconds": 12.0}
        detector = FailureDetector("secret", rank, lambda: state, listener)
        request.addfinalizer(detector.close)
        detector.start()
        return detector

    return listen


def peer_of(detector: FailureDetector) -> Peer:
    return Peer(detector.rank, f"pod-{detector.rank}", ("127.0.0.1",), detector.listener.getsockname()[1])


def test_who_is_found_is_told_to_all_and_strangers_are_not_heard(listening: Callable[..., FailureDetector]) -> None:
    """One that asks late would else miss those that have ended because of the first one."""
    first, second, third = (listening(rank) for rank in range(3))
    first.peers = [peer_of(second), peer_of(third)]
    assert first.describe_failed_processes() == "", "all answer, and wait"
    stranger = FailureDetector("guess", 9, dict, first.listener)
    assert stranger.send_message(peer_of(second), {}) == "ended"
    stranger.send_message(peer_of(second), {"reason": "a lie"})
    third.close()
    socket.create_connection(("127.0.0.1", first.peers[0].port)).close()
    third_peer = first.peers[1]
    assert first.describe_failed_processes() == "rank 2 (pod-2) is lost because the process has ended"
    while not second.reason:  # the message may still be on its way
        time.sleep(0.01)
    second.peers = [peer_of(first), third_peer, Peer(3, "pod-3", ("127.0.0.1",), find_free_port())]
    assert second.describe_failed_processes() == first.reason


def test_of_those_that_answer_the_busy_one_is_named_and_the_lost_ones_come_first() -> None:
    peers = [Peer(rank, f"pod-{rank}", (), 0) for rank in range(12)]
    waits, busy = ({"waits": value, "activity": "an evaluation", "seconds": 301.2} for value in (True, False))
    just_begun = {**busy, "seconds": 0.2}
    assert _describe_failures(dict.fromkeys(peers, waits), 150) == ""
    one = {**dict.fromkeys(peers, waits), peers[2]: just_begun, peers[7]: busy}
    assert _describe_failures(one, math.inf) == "", "an error of this process's own is nobody else's fault"
    assert _describe_failures(one, 150) == "rank 7 (pod-7) has been busy with an evaluation for 301 s"
    both = {**one, peers[3]: "ended", peers[5]: "silent"}
    assert _describe_failures(both, 150) == (
        f"rank 3 (pod-3) is lost because the process has ended and rank 5 (pod-5) is {SILENT}"
    )
    assert _describe_failures(dict.fromkeys(peers, "ended"), 150).endswith(
        "rank 7 (pod-7) and 4 more are lost because the process has ended"
    )


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.244.0.55]:57259: Connection reset by "
            "peer. This is possibly due to GLHF!",
            "the connection to 10.244.0.55 broke or timed out",
        ),
        ("Application timeout caused pair closure", "the connection to another process broke or timed out"),
        ("Horovod has been shut down", "Horovod has been shut down"),
    ],
)
def test_words_of_gloo_are_translated(said: str, meaning: str) -> None:
    assert summarize_gloo_error(RuntimeError(said)) == meaning
