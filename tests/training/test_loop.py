"""Requests to stop. Runs that stop and go on are in `tests/runs/test_records.py`."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gaudi_bert.training.loop import _handle_stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_first_signal_is_a_request_and_a_second_interrupt_is_not_waited_for(number) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), _handle_stop_signals() as is_stopping:
        assert not is_stopping()
        os.kill(os.getpid(), number)
        assert is_stopping()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[bool] = []

    def work() -> None:
        with _handle_stop_signals() as is_stopping:
            seen.append(signal.getsignal(signal.SIGTERM) is before and not is_stopping())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
