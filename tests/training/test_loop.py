"""Requests to stop, and the learning rate. Runs that stop and go on are in `tests/runs/test_records.py`."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.training.loop import _handle_stop_signals, compute_learning_rate
from tests.builders.agree import agree


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


# --- the learning rate of each update: warm-up, the joint, decay


@pytest.mark.parametrize(
    ("peak", "warmup", "updates", "power", "decay_from", "rates"),
    [
        (8.0, 4, 7, 1.0, "warmup", [2, 4, 6, 8, 6, 4, 2, 0]),
        (1.0, 0, 3, 1.0, "warmup", [0.75, 0.5, 0.25]),  # below the peak from the start, and never zero
        (8.0, 4, 8, 1.0, "start", [2, 4, 6, 8, 4, 3, 2, 1, 0]),  # falls where the warm-up ends
        (1.0, 0, 3, 2.0, "warmup", [0.5625, 0.25, 0.0625]),
        (8.0, 1, 4, 0.5, "start", [8, 8 * 0.75**0.5, 8 * 0.5**0.5, 4]),
    ],
)
def test_literal_rates(peak, warmup, updates, power, decay_from, rates) -> None:
    schedule = {"warmup_updates": warmup, "updates": updates, "decay_power": power, "decay_from": decay_from}
    settings = TrainingSettings(learning_rate=peak, **schedule)
    agree([compute_learning_rate(update, settings) for update in range(1, len(rates) + 1)], rates)
