"""A process of several that is killed or stopped is named by all others, in real processes."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_bert.common.launch import find_free_port, torch_environment
from gaudi_bert.engines.roll_call import Member, RollCall, _describe_answers, describe_error

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()
LOOP = """
import os, signal, sys, time
import numpy as np
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.engines.pytorch import distributed
end, victims = sys.argv[1], json.loads(sys.argv[2])
settings = load_pipeline(None, ["training.stall_seconds=3", "training.log_every_updates=1"]).training
process = distributed.connect("cpu", settings, {})
try:
    with process.watched(settings) as own:
        for update in range(1, 2000):
            own.note(f"update {update}")
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
        variables = torch_environment(rank, size, per_host=size, address="127.0.0.1", port=port)
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
        (4, "SIGKILL", [2], f"rank 2 ({HOST}) is lost: the process has ended"),
        (4, "SIGKILL", [0], f"rank 0 ({HOST}) is lost: the process has ended"),
        (4, "SIGSTOP", [1], f"rank 1 ({HOST}) is silent: stopped, asleep, or its node is lost"),
        (3, "SIGSTOP", [0, 2], f"rank 0 ({HOST}), rank 2 ({HOST}) are silent: stopped, asleep, or its node is lost"),
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
        assert (code, told) == (1, f"error: rank {rank} of {size} aborts: {reason}, in update 5; the same command goes on")
        assert "GLHF" not in said


@pytest.fixture
def listening(request: pytest.FixtureRequest) -> Callable[..., RollCall]:
    """Opens a roll call of a rank, which answers until the test ends."""

    def listen(rank: int, waits: bool = True) -> RollCall:
        listener = socket.create_server(("127.0.0.1", 0))
        state = {"waits": waits, "activity": "update 3", "seconds": 12.0}
        roll_call = RollCall("secret", rank, lambda: state, listener)
        request.addfinalizer(roll_call.close)
        roll_call.begin()
        return roll_call

    return listen


def member_of(roll_call: RollCall) -> Member:
    return Member(roll_call.rank, f"pod-{roll_call.rank}", ("127.0.0.1",), roll_call.listener.getsockname()[1])


def test_who_is_found_is_told_to_all_and_strangers_are_not_heard(listening: Callable[..., RollCall]) -> None:
    """One that asks late would else miss those that have ended because of the first one."""
    first, second, third = (listening(rank) for rank in range(3))
    first.members = [member_of(second), member_of(third)]
    assert first.find_reason() == "", "all answer, and wait"
    stranger = RollCall("guess", 9, dict, first.listener)
    assert stranger.call(member_of(second), {}) == "ended"
    stranger.call(member_of(second), {"reason": "a lie"})
    third.close()
    socket.create_connection(("127.0.0.1", first.members[0].port)).close()
    third_member = first.members[1]
    assert first.find_reason() == "rank 2 (pod-2) is lost: the process has ended"
    second.members = [member_of(first), third_member, Member(3, "pod-3", ("127.0.0.1",), find_free_port())]
    assert second.find_reason() == first.reason


def test_of_those_that_answer_the_busy_one_is_named_and_the_lost_ones_come_first() -> None:
    members = [Member(rank, f"pod-{rank}", (), 0) for rank in range(12)]
    waits, busy = ({"waits": value, "activity": "an evaluation", "seconds": 301.2} for value in (True, False))
    just_begun = {**busy, "seconds": 0.2}
    assert _describe_answers(dict.fromkeys(members, waits), 150) == ""
    one = {**dict.fromkeys(members, waits), members[2]: just_begun, members[7]: busy}
    assert _describe_answers(one, math.inf) == "", "an error of this process's own is nobody else's fault"
    assert _describe_answers(one, 150) == "rank 7 (pod-7) has been busy with an evaluation for 301 s"
    both = {**one, members[3]: "ended", members[5]: "silent"}
    assert _describe_answers(both, 150) == (
        "rank 3 (pod-3) is lost: the process has ended and rank 5 (pod-5) is silent: stopped, asleep, or its node is lost"
    )
    assert _describe_answers(dict.fromkeys(members, "ended"), 150).endswith(
        "rank 7 (pod-7) and 4 more are lost: the process has ended"
    )


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.244.0.55]:57259: Connection reset by "
            "peer. This is possibly due to GLHF!",
            "the connection to 10.244.0.55 broke, or nothing came over it",
        ),
        ("Application timeout caused pair closure", "the connection to another process broke, or nothing came over it"),
        ("Horovod has been shut down", "Horovod has been shut down"),
    ],
)
def test_words_of_gloo_are_translated(said: str, meaning: str) -> None:
    assert describe_error(RuntimeError(said)) == meaning
