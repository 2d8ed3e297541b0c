"""All processes watch over each other for as long as a context lasts: it begins and ends at the same time in all of them.

Rank 0 opens the server and shares its address and a random token by a sum; each process connects; then each leaves in one of
three ways. Done, or stopped on request: after a barrier, so that no launcher sees one process end while another still
saves. Failed: the server tells the others why. Broken off in the middle of a sum, because another process has gone: it waits
for the verdict, which names that process and ends this one.
"""

from __future__ import annotations

import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from gaudi_bert.common.errors import FailedError, GaudiBertError, InputError, StoppedError
from gaudi_bert.config import TrainingSettings
from gaudi_bert.training.distributed.communicator import Communicator
from gaudi_bert.training.distributed.watch_server import WatchServer
from gaudi_bert.training.distributed.watchdog import Watchdog, connect_to_server, own_addresses

__all__ = ["watch_session"]

VERDICT_SECONDS = 6.0
ADDRESS_BYTES = 1024


@contextmanager
def watch_session(communicator: Communicator, settings: TrainingSettings) -> Iterator[Watchdog]:
    """Watch over each other, and leave together.

    Raises:
        InputError: the watchdog's port is taken.
        FailedError: another process cannot be reached, or has gone.
    """
    server, watchdog = _begin(communicator, settings)
    try:
        yield watchdog
        communicator.barrier()
    except StoppedError:  # in all processes, at the same update
        _outlive_the_launcher()
        communicator.barrier()
        watchdog.leave()
        raise
    except GaudiBertError as error:
        _outlive_the_launcher()
        watchdog.fail(str(error), error.exit_code)
        raise
    except (tf.errors.OpError, RuntimeError) as error:
        watchdog.await_verdict(VERDICT_SECONDS)
        _outlive_the_launcher()
        text = " ".join(str(error).split())[:300]
        watchdog.fail(text, FailedError.exit_code)
        raise FailedError(f"rank {communicator.rank}: {text}") from error
    except BaseException as error:
        _outlive_the_launcher()
        watchdog.fail(f"{type(error).__name__}: {error}", FailedError.exit_code)
        raise
    else:
        watchdog.leave()
    finally:
        if server is not None:
            server.wait(VERDICT_SECONDS)


def _outlive_the_launcher() -> None:
    """Launchers terminate the other processes as soon as one has ended: let this one say its last word, it ends soon."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _begin(communicator: Communicator, settings: TrainingSettings) -> tuple[WatchServer | None, Watchdog]:
    """Start the server in rank 0 and connect every process to it; all succeed or all fail."""
    server, offer = _open_server(communicator, settings) if communicator.is_first else (None, "")
    try:
        offer = _share_text(communicator, offer)
        token, _, place = offer.partition(" ")
        if not token:
            raise InputError(place)
        port, *hosts = place.split(" ")
        problem, watchdog = "another process cannot reach the watchdog in rank 0; see what it says", None
        try:
            watchdog = Watchdog(connect_to_server(hosts, int(port)), token, communicator.rank, settings.stall_seconds)
        except FailedError as error:
            problem = str(error)
        if communicator.any_true(watchdog is None) or watchdog is None:
            raise FailedError(problem)
    except (tf.errors.OpError, RuntimeError) as error:
        raise FailedError(
            f"rank {communicator.rank}: another process ended before the run began; see what it says"
        ) from error
    return server, watchdog


def _share_text(communicator: Communicator, text: str) -> str:
    """What rank 0 gave as `text`, at most `ADDRESS_BYTES` of UTF-8."""
    padded = text.encode().ljust(ADDRESS_BYTES, b"\0") if communicator.is_first else bytes(ADDRESS_BYTES)
    summed = communicator.sum_array(np.frombuffer(padded, np.uint8))
    return summed.astype(np.uint8).tobytes().rstrip(b"\0").decode()


def _open_server(communicator: Communicator, settings: TrainingSettings) -> tuple[WatchServer | None, str]:
    """The server, and where it is as one text: token, port, hosts; or without a token, why there is none."""
    alone = communicator.local_size == communicator.size
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1" if alone else "", settings.watch_port))
    except OSError as error:
        listener.close()
        return None, (
            f" training.watch_port = {settings.watch_port}: rank 0 cannot listen there ({error.strerror}); "
            "choose another port, or 0 for any that is free"
        )
    listener.listen(communicator.size)
    token = secrets.token_hex(16)
    server = WatchServer(listener, communicator.size, token, settings.stall_seconds)
    server.start()
    hosts = ["127.0.0.1"] if alone else own_addresses()
    return server, " ".join([token, str(listener.getsockname()[1]), *hosts])
