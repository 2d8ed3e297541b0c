"""Checkpoints: the bits come back, damage is noticed; a run resumes from the newest whole one; and requests to stop."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save

from gaudi_bert.common.errors import InputError
from gaudi_bert.config.sections import TrainingSettings
from gaudi_bert.engines import load_engine
from gaudi_bert.engines.protocol import Communicator, Model, Updates
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.checkpoint import (
    Checkpoint,
    Progress,
    _list_checkpoints,
    _read_newest_checkpoint,
    broadcast_state,
    find_checkpoint,
    read_checkpoint,
    read_checkpoint_identity,
    read_newest_settings,
    remove_old_checkpoints,
    restore_newest_checkpoint,
    write_checkpoint,
)
from gaudi_bert.training.weights import load_weights
from tests.builders.agree import identical
from tests.builders.model_packs import pretraining_model
from tests.builders.properties import examples


def make(update: int) -> Checkpoint:
    random = np.random.default_rng(update)

    def values() -> dict[str, np.ndarray]:
        return {
            name: np.asarray(random.normal(size=shape), np.float32)
            for name, shape in {"a/b": (3, 5), "c": (), "d": (0, 2)}.items()
        }

    progress = {"packs": 7 * update, "order": 4, "processes": 1, "sequences": 9, "tokens": 99}
    return Checkpoint(update, values(), values(), values(), progress, {"model": {"hidden_size": 3}, "training": {"seed": 1}})


def test_comes_back_to_the_bit_and_is_a_safetensors_file(tmp_path) -> None:
    checkpoint = make(12)
    path = write_checkpoint(tmp_path, checkpoint)
    assert path.name == "update-00000012.safetensors"
    identical(vars(read_checkpoint(path)), vars(checkpoint))
    tensors = load_file(path)
    np.testing.assert_array_equal(tensors["model/a/b"], checkpoint.variables["a/b"])
    assert len(tensors) == 9
    assert write_checkpoint(tmp_path / "again", make(12)).read_bytes() == path.read_bytes()
    assert len({read_checkpoint_identity(write_checkpoint(tmp_path, make(update))) for update in (1, 2, 12)}) == 3


# JSON that is not what a checkpoint holds, with the right checksum.
LIES = [
    *[((), lie) for lie in ("5", "[[]]", "null", "[" * 10_000)],
    *[(("update",), lie) for lie in ("-1", "1.5", '"x"', "true", "NaN", "1e999")],
    *[(("format_version",), "3"), (("unknown",), "5"), (("progress", "packs"), '"5"'), (("progress", "unknown"), "5")],
    *[(("settings", "model"), '"\\ud800"'), (("settings", "compiled_kernels"), "1"), (("tensors",), "[]")],
    *[(("tensors", "model/a/b"), "5"), (("tensors", "model/a/b", 1), "[1]"), (("tensors", "model/a/b", 2), "5")],
]


def with_lie(path: Path, place: tuple[str | int, ...], lie: str) -> None:
    """Write `lie` at a place of the JSON of a checkpoint, and its checksum."""
    with safe_open(path, framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = json.loads(file.metadata()["gaudi_bert"].partition(" ")[2])
    whole = {"state": state}
    within, last = whole, "state"
    for name in place:
        within, last = within[last], name
    within[last] = "THE LIE"
    text = json.dumps(whole["state"]).replace('"THE LIE"', lie)
    path.write_bytes(save(tensors, metadata={"gaudi_bert": f"{zlib.crc32(text.encode()):08x} {text}"}))


def test_json_that_is_not_that_of_a_checkpoint_is_refused_in_a_line(tmp_path) -> None:
    path = write_checkpoint(tmp_path, make(1))
    whole = path.read_bytes()
    for header in (b"5", b'{"__metadata__": {"gaudi_bert": 5}}', b"[" * 10_000, b'"\xff"'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        for read in (read_checkpoint, read_checkpoint_identity):
            with pytest.raises(InputError, match=r"\A[^\n]*: the file is not a complete checkpoint [^\n]*\Z"):
                read(path)
    for place, lie in LIES:
        path.write_bytes(whole)
        with_lie(path, place, lie)
        with pytest.raises(
            InputError, match=r"\A[^\n]*update-00000001\.safetensors: the file is not a complete checkpoint [^\n]*\Z"
        ):
            read_checkpoint(path)
        assert read_newest_settings(tmp_path) is None or place[:1] == ("tensors",)
    path.write_bytes(whole)
    with_lie(path, ("update",), "5")  # no lie
    assert read_checkpoint(path).update == 5


@settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_and_any_cut_is_noticed(tmp_path, data) -> None:
    checkpoint = make(1)
    path = write_checkpoint(tmp_path, checkpoint)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    path.write_bytes(content)
    warnings: list[str] = []
    with contextlib.suppress(InputError):
        found = _read_newest_checkpoint(tmp_path, warnings.append)
        identical(vars(found), vars(checkpoint))  # white space in the header, and nothing else, may change
        return
    (warning,) = warnings
    assert re.fullmatch(f"[^\n]*{re.escape(str(path))}[^\n]*", warning)


def test_only_the_newest_are_kept_and_the_newest_whole_one_is_read(tmp_path) -> None:
    folder, warnings = tmp_path / "run" / "checkpoints", []
    assert _read_newest_checkpoint(folder, pytest.fail) is None
    for update in (1, 2, 3, 10):
        write_checkpoint(folder, make(update))
    remove_old_checkpoints(folder, 2)
    older, newest = _list_checkpoints(folder)
    assert [older.name, newest.name] == ["update-00000003.safetensors", "update-00000010.safetensors"]
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(folder) == newest
    newest.write_bytes(newest.read_bytes()[:-3])
    identical(vars(_read_newest_checkpoint(folder, warnings.append)), vars(make(3)))
    assert [newest.name in warning for warning in warnings] == [True]
    older.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="none of the 2 checkpoints can be read"):
        _read_newest_checkpoint(folder, warnings.append)


# --- resuming a run: all is restored, another model is refused


def make_run(seed: int, **changes) -> tuple[Model, Updates]:
    sizes = {"vocab_size": 11, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 5}
    model = pretraining_model(BertConfig(**{**sizes, "max_position_embeddings": 7, **changes}), seed)
    return model, load_engine("tensorflow").create_updates(model, TrainingSettings(), Communicator(), 1)


SIGNATURE = {"stage": "train", "settings": {"training": {"seed": 1, "updates": 9}}, "inputs": {"data": "abc"}}


def save_run(folder, model: Model, order: int = 4) -> Path:
    random, values = np.random.default_rng(0), model.copy_variables()
    first, second = ({name: random.random(value.shape, np.float32) for name, value in values.items()} for _ in range(2))
    progress = {"packs": 30, "order": order, "processes": 2, "sequences": 80, "tokens": 900}
    return write_checkpoint(folder, Checkpoint(5, values, first, second, progress, {"run": SIGNATURE}))


def test_a_checkpoint_of_another_order_is_refused_and_without_any_a_run_starts_at_the_beginning(tmp_path) -> None:
    model, updates = make_run(1)
    assert restore_newest_checkpoint(tmp_path, model, updates, SIGNATURE, print) == Progress()
    save_run(tmp_path, model, order=3)
    with pytest.raises(InputError, match=r"uses reading order 3, .* uses reading order 4;"):
        restore_newest_checkpoint(tmp_path, model, updates, SIGNATURE, print)


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (
            "settings",
            {"training": {"seed": 2, "updates": 9}},
            r"settings\.training\.seed: 1 in the file, 2 in this run",
        ),
        ("inputs", {"data": "abd"}, r'inputs\.data: "abc" in the file, "abd" in this run'),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_but_one_of_fewer_updates_is_not(tmp_path, place, value, expected) -> None:
    model, updates = make_run(1)
    save_run(tmp_path, model)
    before = model.copy_variables()
    with pytest.raises(InputError, match=rf"\A[^\n]*the checkpoint belongs to another run \({expected}\); [^\n]*\Z"):
        restore_newest_checkpoint(tmp_path, model, updates, {**SIGNATURE, place: value}, print)
    identical(model.copy_variables(), before)
    longer = {**SIGNATURE, "settings": {"training": {"seed": 1, "updates": 90}}}
    assert restore_newest_checkpoint(tmp_path, model, updates, longer, print).update == 5


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path) -> None:
    path = save_run(tmp_path, make_run(1)[0])
    model, updates = make_run(2, num_hidden_layers=2)
    before = model.copy_variables()
    with pytest.raises(InputError, match=r"belongs? to another model: bert/.*layer_1/.*found none"):
        restore_newest_checkpoint(tmp_path, model, updates, SIGNATURE, print)
    with pytest.raises(InputError, match=r"belongs? to another model"):
        load_weights(path, model, model.spec.config)
    identical(model.copy_variables(), before)


class SecondOfTwo(Communicator):
    """Process 1 beside a process 0 that has done 5 updates of 30 packs, and whose every variable is 7."""

    def sum_array(self, values):
        return np.asarray(values) + np.array([5, 30, 80, 900])

    def broadcast(self, arrays):
        return {name: np.full_like(array, 7) for name, array in arrays.items()}


def test_the_other_processes_are_given_the_state_of_the_first() -> None:
    model, updates = make_run(2)
    own = Progress(99, 99, 99, 99)
    assert broadcast_state(own, model, updates, SecondOfTwo(rank=1, size=2)) == Progress(5, 30, 80, 900)
    for values in (model.copy_variables(), *updates.copy_moments()):
        assert all((value == 7).all() for value in values.values())
    assert broadcast_state(own, model, updates, Communicator()) == own
