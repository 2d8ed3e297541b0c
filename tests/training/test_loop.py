"""Resuming a run: all is restored, another model is refused, another number of processes is named; and stopping it."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines.choose import load_engine
from gaudi_bert.engines.communicator import Communicator
from gaudi_bert.engines.protocol import Model, Updates
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.checkpoint import Checkpoint, Progress, resume_run, share_state, write_checkpoint
from gaudi_bert.training.loop import stop_requests
from gaudi_bert.training.weights.sources import load_weights
from tests.builders.engine_models import pretraining_model


def make(seed: int, **changes) -> tuple[Model, Updates]:
    sizes = {"vocab_size": 11, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 5}
    model = pretraining_model(BertConfig(**{**sizes, "max_position_embeddings": 7, **changes}), seed)
    return model, load_engine("tensorflow").updates(model, TrainingSettings(), Communicator(), 1)


def save(folder, model: Model, progress: dict | None = None):
    random = np.random.default_rng(0)
    values = model.values()
    first, second = ({name: random.random(value.shape, np.float32) for name, value in values.items()} for _ in range(2))
    progress = progress or {"packs": 30, "order": 4, "processes": 2, "sequences": 80, "tokens": 900}
    checkpoint = Checkpoint(5, values, first, second, progress)
    return write_checkpoint(folder, checkpoint), checkpoint


def test_model_moments_and_position_come_back(tmp_path) -> None:
    _, stored = save(tmp_path, make(1)[0])
    model, updates = make(2)
    said: list[str] = []
    assert resume_run(tmp_path, model, updates, said.append) == Progress(5, 30, 80, 900)
    for variables, values in [
        (model.values(), stored.variables),
        (updates.moments()[0], stored.first_moments),
        (updates.moments()[1], stored.second_moments),
    ]:
        for name, value in values.items():
            np.testing.assert_array_equal(variables[name], value)
    assert said == []


def test_without_checkpoints_a_run_starts_at_the_beginning(tmp_path) -> None:
    assert resume_run(tmp_path / "none", *make(2), print) == Progress()


@pytest.mark.parametrize("position", [{"packs_per_process": 30}, {"packs": 60}, {"packs": 60, "order": 3}])
def test_a_checkpoint_of_another_order_is_refused(tmp_path, position) -> None:
    save(tmp_path, make(1)[0], {**position, "processes": 2, "sequences": 80, "tokens": 900})
    with pytest.raises(InputError, match=r"written by an earlier edition, .* train again with --overwrite"):
        resume_run(tmp_path, *make(2), print)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_size": 12}, r"word_embeddings is \[11, 6\] there, \[12, 6\] here"),
        ({"num_hidden_layers": 2}, r"layer_1/.* is absent there"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path, changes, expected) -> None:
    path, _ = save(tmp_path, make(1)[0])
    model, updates = make(2, **changes)
    before = model.values()
    with pytest.raises(InputError, match=f"of another model: bert/.*{expected}"):
        resume_run(tmp_path, model, updates, print)
    with pytest.raises(InputError, match="of another model"):
        load_weights(path, model, model.spec.config)
    for name, value in before.items():
        np.testing.assert_array_equal(model.values()[name], value)


class SecondOfTwo(Communicator):
    """Process 1 beside a process 0 that has `progress`, and whose every variable is 7."""

    progress = (5, 30, 80, 900)

    def sum_array(self, values):
        return np.asarray(values) + self.progress

    def broadcast(self, arrays):
        return {name: np.full_like(array, 7) for name, array in arrays.items()}


def test_the_other_processes_are_given_the_state_of_the_first() -> None:
    model, updates = make(2)
    own = Progress(99, 99, 99, 99)
    assert share_state(own, model, updates, SecondOfTwo(rank=1, size=2)) == Progress(5, 30, 80, 900)
    for values in (model.values(), *updates.moments()):
        assert all((value == 7).all() for value in values.values())
    assert share_state(own, model, updates, Communicator()) == own


# --- requests to stop: the first signal is remembered, a second Ctrl-C interrupts, handlers are put back


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_first_signal_is_a_request(number) -> None:
    before = signal.getsignal(number)
    with stop_requests() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_a_second_interrupt_is_not_waited_for() -> None:
    with stop_requests() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[bool] = []

    def work() -> None:
        with stop_requests() as stop:
            seen.append(signal.getsignal(signal.SIGTERM) is before and not stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
