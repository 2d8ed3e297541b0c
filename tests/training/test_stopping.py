"""Requests to stop: the first signal is remembered, a second Ctrl-C interrupts, handlers are put back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gaudi_bert.training.stopping import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_first_signal_is_a_request(number) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_a_second_interrupt_is_not_waited_for() -> None:
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[bool] = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(signal.getsignal(signal.SIGTERM) is before and not stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
