"""A watchdog over the processes of a run: who is lost, stopped, asleep or failing is named, and all processes end.

Horovod alone does less. Measured with Horovod 0.28.1 over Gloo, three processes, a stall inspector set to warn after 3 s and
to shut down after 6 s, and a Gloo timeout of 10 s:

    one process ...                      the others end after       and are given
    is killed (SIGKILL)                  3 s                        the address of a socket, no rank
    is stopped (SIGSTOP)                 14 s, the Gloo timeout     that a receive timed out, no rank
    fails and ends                       6 s                        that Horovod was shut down, no rank, no reason
    sleeps in its step                   never (300 s)              nothing: Horovod's own thread in it is awake

A traceback by `faulthandler` after so many seconds, with an exit, ends the run as well, but a stopped process prints none,
and the launcher then names the healthy one that gave up first; under mpirun no traceback names its rank.

So every process has one connection to rank 0. Twice a second it reports what its main thread is doing, and hears whether the
run ends, and why. Processes meet at *meeting points*: sums that all of them take part in. Each process counts those that it
has reached, so a waiting process is ahead of the one it waits for. `check_members` decides what ends a run, within
`stall_seconds` after the last sign of work, at once after a loss or a failure, and reaches every process within two seconds.

A process whose launcher has ended asks itself to stop, which saves a checkpoint, and ends anyway soon after.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from gaudi_bert import __version__
from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError, shortened
from gaudi_bert.config.sections import LoopSettings
from gaudi_bert.engines.protocol import Communicator, T

_BEAT_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
# Within three beats every process that can hear has confirmed the verdict.
_HEARING_SECONDS = 3 * _BEAT_SECONDS
# How long a process that ends waits for the others to hear why.
_FAREWELL_SECONDS = 6.0
# How long a process may take to save and end once its launcher has ended.
ORPHAN_SECONDS = 10.0


def _end_process(line: str, exit_code: int) -> None:
    """Print `line` and end this process, whatever its threads are doing.

    A launcher ends all processes once one has ended, so none ends before the others can have heard why.
    """
    print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the last word of a process that ends here
    time.sleep(_HEARING_SECONDS)
    os._exit(exit_code)


class Watchdog:
    """The thread of one process that speaks to rank 0, and ends the process when the run ends.

    `server` is rank 0's own, None in the others; `end` ends the process.
    """

    def __init__(
        self,
        connection: socket.socket,
        token: str,
        rank: int,
        stall_seconds: float,
        server: WatchServer | None = None,
        end: Callable[[str, int], None] = _end_process,
    ) -> None:
        connection.settimeout(stall_seconds)
        self._stream, self._rank, self._stall_seconds = connection.makefile("rwb"), rank, stall_seconds
        self._server, self._end = server, end
        self._arrivals, self._signs, self._activity, self._slow = 0, 0, "starting", True
        self._launcher = os.getppid()
        self._orphaned: float | None = None
        self._speaking, self._leaving = threading.Lock(), threading.Event()
        self._exchange({"token": token, "rank": rank, "name": f"{socket.gethostname()}, process {os.getpid()}"})
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def arrive(self) -> None:
        """This process has reached a meeting point: from now on it waits for the others."""
        self._arrivals += 1

    def note(self, activity: str, slow: bool) -> None:
        """A sign of work, what it is on, and whether that may take longer than usual."""
        self._signs += 1
        self._activity, self._slow = activity, slow

    def leave(self) -> None:
        """Report that all is done; the others continue without this process."""
        self._send_last({"bye": True})

    def fail(self, reason: str, exit_code: int) -> None:
        """Report that this process fails, so that all others end with its exit code."""
        self._send_last({"failed": reason, "exit_code": exit_code})

    def await_verdict(self, seconds: float) -> None:
        """Give the verdict time to come, which ends this process."""
        self._thread.join(seconds)

    def _send_last(self, message: dict[str, Any]) -> None:
        self._leaving.set()
        try:
            self._exchange(message)
        except (OSError, ValueError):
            return  # nobody is listening any more
        if self._server is not None:
            self._server.wait(_FAREWELL_SECONDS)

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message; the answer, or an OSError or ValueError where none comes."""
        with self._speaking:
            self._stream.write(json.dumps(message).encode() + b"\n")
            self._stream.flush()
            answer: dict[str, Any] = json.loads(self._stream.readline())
            return answer

    def _watch(self) -> None:
        while not self._leaving.wait(_BEAT_SECONDS):
            verdict = self._beat() or self._check_launcher()
            if verdict is not None and not self._leaving.is_set():
                if self._server is not None:
                    self._server.wait(_FAREWELL_SECONDS)
                self._end(f"rank {self._rank} aborts: {verdict.text}", verdict.exit_code)
            if verdict is not None:
                return

    def _beat(self) -> _Verdict | None:
        """Report what the main thread is doing; the verdict of rank 0, or that rank 0 is lost."""
        state = {"arrivals": self._arrivals, "signs": self._signs, "activity": self._activity, "slow": self._slow}
        try:
            answer = self._exchange(state)
        except TimeoutError:
            return _Verdict(f"rank 0 has sent nothing for {self._stall_seconds:.0f} s: it is stopped, or cannot be reached")
        except (OSError, ValueError):
            return _Verdict("rank 0 is lost: its process has ended or was killed")
        return _Verdict(**answer) if answer else None

    def _check_launcher(self) -> _Verdict | None:
        """Ask this process to stop once its launcher has ended, and end it where it does not."""
        if os.getppid() == self._launcher:
            return None
        if self._orphaned is None:
            self._orphaned = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
        if time.monotonic() - self._orphaned < ORPHAN_SECONDS:
            return None
        return _Verdict(f"its launcher, process {self._launcher}, has ended")


@contextmanager
def watch(communicator: ConnectedProcess, settings: LoopSettings) -> Iterator[Watchdog]:
    """All processes watch over each other; the context begins and ends at the same time in all of them."""
    watchdog = _begin(communicator, settings)
    try:
        yield watchdog
        communicator.barrier()
        watchdog.leave()
    except StoppedError:  # in all processes, at the same update
        _outlive_the_launcher()
        communicator.barrier()
        watchdog.leave()
        raise
    except GaudiBertError as error:
        _outlive_the_launcher()
        watchdog.fail(str(error), error.exit_code)
        raise
    except communicator.errors as error:  # a sum that another process did not come to
        watchdog.await_verdict(_FAREWELL_SECONDS)
        _outlive_the_launcher()
        text = " ".join(str(error).split())[:300]
        watchdog.fail(text, FailedError.exit_code)
        raise FailedError(f"rank {communicator.rank}: {text}") from error
    except KeyboardInterrupt:  # a second Ctrl-C
        _outlive_the_launcher()
        watchdog.fail("interrupted", StoppedError.exit_code)
        raise
    except BaseException as error:
        _outlive_the_launcher()
        watchdog.fail(f"{type(error).__name__}: {error}", FailedError.exit_code)
        raise


def _outlive_the_launcher() -> None:
    """Launchers terminate the other processes as soon as one has ended: let this one send its last message, it ends soon."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _begin(communicator: ConnectedProcess, settings: LoopSettings) -> Watchdog:
    """Compare what all run, start the server in rank 0, and connect every process to it; all succeed or all fail."""
    server, own_offer = _open_server(communicator, settings) if communicator.is_first else (None, "")
    try:
        communicator.compare()
        offer = communicator.from_first(lambda: own_offer)
        if isinstance(offer, str):
            raise InputError(offer)
        problem, watchdog = "another process cannot reach the watchdog in rank 0; see its error", None
        try:
            connection = connect_to_server(offer.hosts, offer.port, f"{settings.section_name}.watch_port")
            watchdog = Watchdog(connection, offer.token, communicator.rank, settings.stall_seconds, server)
        except FailedError as error:
            problem = str(error)
        if communicator.any_true(watchdog is None) or watchdog is None:
            raise FailedError(problem)
    except communicator.errors as error:
        raise FailedError(f"rank {communicator.rank}: another process ended before the run began; see its error") from error
    return watchdog


class _Offer(NamedTuple):
    """Where the server listens, and the token that it expects first."""

    hosts: list[str]
    port: int
    token: str


def _open_server(communicator: Communicator, settings: LoopSettings) -> tuple[WatchServer | None, _Offer | str]:
    """The server and where it is; or why there is none."""
    is_one_host = communicator.local_size == communicator.size
    token = secrets.token_hex(16)
    try:
        address = ("127.0.0.1" if is_one_host else "", settings.watch_port)
        server = WatchServer(address, communicator.size, token, settings.stall_seconds)
    except OSError as error:
        return None, (
            f"{settings.section_name}.watch_port = {settings.watch_port}: rank 0 cannot listen there ({error.strerror}); "
            "choose another port, or 0 for any that is free"
        )
    hosts = ["127.0.0.1"] if is_one_host else own_addresses()
    return server, _Offer(hosts, server.server_address[1], token)


def connect_to_server(hosts: Sequence[str], port: int, port_key: str = "training.watch_port") -> socket.socket:
    """A connection to the first of `hosts` that answers; `port_key` is the setting that chooses another port."""
    for host in hosts:
        try:
            return socket.create_connection((host, port), _CONNECT_SECONDS)
        except OSError:
            continue
    raise FailedError(
        f"rank 0 does not answer at port {port} of {' or '.join(hosts)}; "
        f"open that port between the workers, or set {port_key} to one that is open"
    )


def own_addresses() -> list[str]:
    """By which other hosts may reach this one: the address of its default route, and its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: nothing is sent, only a route is looked up
            routed = [probe.getsockname()[0]]
        except OSError:
            routed = []
    return [*routed, socket.gethostname()]


@dataclass(frozen=True)
class ConnectedProcess(Communicator):
    """One of several processes; `watchdog` is None until they watch each other. An engine adds how arrays travel.

    `facts` have to be the same in all: they are compared before the processes watch each other.
    """

    watchdog: Watchdog | None = None
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns in the first process, which alone calls it; every process gets it."""
        return self._from_rank(0, make)

    def _from_rank(self, rank: int, make: Callable[[], T]) -> T:
        content = np.frombuffer(pickle.dumps(make()) if self.rank == rank else b"", np.uint8)
        size = int(self.sum_array(np.array([len(content)]))[0])
        shared = self.sum_array(content if self.rank == rank else np.zeros(size))
        value: T = pickle.loads(shared.astype(np.uint8).tobytes())
        return value

    def compare(self) -> None:
        """Refuse `facts` that are not those of rank 0; all processes raise the same error, about the first that differs."""
        host = socket.gethostname()
        first_host, first = self.from_first(lambda: (host, dict(self.facts)))
        difference = difference_of(self.facts, first, f"rank {self.rank} ({host})", f"rank 0 ({first_host})")
        differing = np.zeros(self.size)
        differing[self.rank] = difference is not None
        differing = self.sum_array(differing)
        if differing.any():
            raise InputError(self._from_rank(int(differing.argmax()), lambda: str(difference)))

    def note(self, activity: str, *, slow: bool = False) -> None:
        """Tell the watchdog what this process is doing."""
        if self.watchdog is not None:
            self.watchdog.note(activity, slow)

    def arrive(self) -> None:
        """Tell the watchdog that this process is about to wait for the others."""
        if self.watchdog is not None:
            self.watchdog.arrive()

    @contextmanager
    def watched(self, settings: LoopSettings) -> Iterator[Communicator]:
        """This process with its watchdog, while the context lasts."""
        with watch(self, settings) as watchdog:
            yield replace(self, watchdog=watchdog)


def shared_facts(settings: LoopSettings, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same in all processes of a run, by its name."""
    own = settings.model_dump(mode="json", exclude={"device", "threads"})
    keys = {f"{settings.section_name}.{name}": value for name, value in own.items()}
    return {"gaudi-bert": __version__, **keys, **facts}


def difference_of(facts: Mapping[str, Any], first: Mapping[str, Any], who: str, first_name: str) -> str | None:
    """What one process, `who`, runs that the first one does not; None if they run the same."""
    for name, value in first.items():
        if facts.get(name) != value:
            own, right = (shortened(str(each)) for each in (facts.get(name), value))
            return (
                f"{who} has {name} = {own}, {first_name} has {right}; "
                "start all ranks with the same version, settings, model and data"
            )
    return None


# --- The server in rank 0: what it knows of every process, when that ends the run, and which of them know

# Slow work (building a graph, writing a checkpoint) may take so many times as long.
_SLOW_WORK_FACTOR = 3
# When the run ends, nobody waits for a process that has been silent for so long (it speaks twice a second).
_SILENT_SECONDS = 3.0
_SENDING_SECONDS = 0.2


@dataclass
class Member:
    """One process as rank 0 knows it.

    `last_progress` is when it last reached a meeting point or showed a sign of work; both times are seconds of a monotonic
    clock. `slow`: its present `activity` may take longer than usual. A process that has `failed` gave `reason` and
    `exit_code`; one is `lost` once its connection broke. `notified`: it knows the verdict.
    """

    rank: int
    name: str
    last_heartbeat: float
    last_progress: float
    arrivals: int = 0
    signs: int = 0
    activity: str = "starting"
    slow: bool = True
    state: Literal["here", "done", "failed", "lost"] = "here"
    reason: str = ""
    exit_code: int = 1
    notified: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


@dataclass(frozen=True)
class _Verdict:
    """Why the run ends, as one line that names the rank, and the exit code of all processes."""

    text: str
    exit_code: int = 1


def check_members(members: Sequence[Member], now: float, stall_seconds: float) -> _Verdict | None:
    """The reason to end the run, or None.

    Checked in this order: a process that failed; one whose connection broke; one without a heartbeat for `stall_seconds`;
    one that has reached fewer meeting points than another and shown no sign of work for so long; all of them at the same
    point for so long.
    """
    for member in members:
        if member.state == "failed":
            return _Verdict(f"{member} failed: {member.reason}", member.exit_code)
    for member in members:
        if member.state == "lost":
            return _Verdict(f"{member} is lost in {member.activity}: its process has ended or was killed")
    here = [member for member in members if member.state == "here"]
    for member in here:
        if now - member.last_heartbeat > stall_seconds:
            silence = f"{member} has sent no heartbeat for {now - member.last_heartbeat:.0f} s in {member.activity}"
            return _Verdict(f"{silence}: its process is stopped, or its host cannot be reached")
    fewest = min((member.arrivals for member in here), default=0)
    behind = [member for member in here if member.arrivals == fewest]
    stuck = [m for m in behind if now - m.last_progress > stall_seconds * (_SLOW_WORK_FACTOR if m.slow else 1)]
    names = ", ".join(f"{member} in {member.activity}" for member in stuck)
    seconds = min((now - member.last_progress for member in stuck), default=0.0)
    if stuck and len(behind) < len(here):
        return _Verdict(f"{names}: no sign of work for {seconds:.0f} s, and the other processes wait for it")
    if stuck and len(stuck) == len(here):
        return _Verdict(f"no process has moved for {seconds:.0f} s: {names}; check the network between them")
    return None


class WatchServer(socketserver.ThreadingTCPServer):
    """Hears every process, rank 0 itself too, and answers each message with the verdict, if there is one.

    Messages and answers are JSON, one per line: `{"token", "rank", "name"}` first, then `{"arrivals", "signs",
    "activity", "slow"}` repeatedly, and at last `{"bye"}` or `{"failed", "exit_code"}`.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], size: int, token: str, stall_seconds: float) -> None:
        super().__init__(address, _Connection)
        self.token = token
        self._size, self._stall_seconds = size, stall_seconds
        self._members: dict[int, Member] = {}
        self._verdict: _Verdict | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self.serve_forever, args=(0.1,), name="watch-server", daemon=True).start()

    def enter(self, rank: int, name: str) -> Member:
        """Register a process that has connected."""
        now = time.monotonic()
        with self._changed:
            self._members[rank] = Member(rank, name, now, now)
            return self._members[rank]

    def hear(self, member: Member, message: dict[str, Any]) -> dict[str, Any]:
        """Record a message of a process; the answer to it."""
        with self._changed:
            member.last_heartbeat = time.monotonic()
            if "bye" in message:
                member.state = "done"
            elif "failed" in message:
                member.state, member.reason, member.exit_code = "failed", message["failed"], message["exit_code"]
            elif self._verdict is None:
                if (message["arrivals"], message["signs"]) != (member.arrivals, member.signs):
                    member.last_progress = member.last_heartbeat
                member.arrivals, member.signs = message["arrivals"], message["signs"]
                member.activity, member.slow = message["activity"], message["slow"]
                members = [self._members[rank] for rank in sorted(self._members)]
                self._verdict = check_members(members, member.last_heartbeat, self._stall_seconds)
            member.notified = self._verdict is not None
            self._changed.notify_all()
            return {} if self._verdict is None else vars(self._verdict)

    def lose(self, member: Member) -> None:
        """The connection of a process has ended."""
        with self._changed:
            if member.state == "here" and not member.notified:
                member.state = "lost"
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until every process but rank 0 is done, has failed, knows the verdict or is silent; at most `seconds`."""
        with self._changed:
            self._changed.wait_for(self._is_done, seconds)
        time.sleep(_SENDING_SECONDS)  # what was answered last is still on its way out

    def _is_done(self) -> bool:
        others = [member for rank, member in self._members.items() if rank]
        silent = time.monotonic() - _SILENT_SECONDS
        awaited = [each for each in others if each.state == "here" and not each.notified and each.last_heartbeat > silent]
        return len(others) == self._size - 1 and not awaited


class _Connection(socketserver.StreamRequestHandler):
    server: WatchServer

    def handle(self) -> None:
        """Hear one process from its first message to its last."""
        member = None
        try:
            hello = json.loads(self.rfile.readline())
            if hello["token"] != self.server.token:
                return
            member = self.server.enter(int(hello["rank"]), str(hello["name"]))
            self.wfile.write(b"{}\n")
            for line in self.rfile:
                self.wfile.write(json.dumps(self.server.hear(member, json.loads(line))).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError):
            return  # not one of ours, or cut off in the middle of a message
        finally:
            if member is not None:
                self.server.lose(member)
