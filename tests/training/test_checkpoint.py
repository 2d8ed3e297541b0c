"""Checkpoints: the bits come back, damage is noticed, the one before is used."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from gaudi_bert.common.errors import InputError
from gaudi_bert.training.checkpoint import (
    Checkpoint,
    checkpoint_files,
    checkpoint_identity,
    find_checkpoint,
    is_checkpoint,
    read_checkpoint,
    read_newest,
    remove_old_checkpoints,
    write_checkpoint,
)
from tests.builders.agree import identical
from tests.builders.properties import examples


def make(update: int) -> Checkpoint:
    random = np.random.default_rng(update)

    def values() -> dict[str, np.ndarray]:
        return {
            name: np.asarray(random.normal(size=shape), np.float32)
            for name, shape in {"a/b": (3, 5), "c": (), "d": (0, 2)}.items()
        }

    progress = {"packs_per_process": 7 * update, "processes": 1, "sequences": 9, "tokens": 99}
    return Checkpoint(update, values(), values(), values(), progress, {"model": {"hidden_size": 3}, "training": {"seed": 1}})


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    identical(vars(one), vars(other))


def test_comes_back_to_the_bit_and_is_a_safetensors_file(tmp_path) -> None:
    checkpoint = make(12)
    path = write_checkpoint(tmp_path, checkpoint)
    assert path.name == "update-00000012.safetensors"
    assert_same(read_checkpoint(path), checkpoint)
    tensors = load_file(path)
    np.testing.assert_array_equal(tensors["model/a/b"], checkpoint.variables["a/b"])
    assert len(tensors) == 9
    assert write_checkpoint(tmp_path / "again", make(12)).read_bytes() == path.read_bytes()
    assert len({checkpoint_identity(write_checkpoint(tmp_path, make(update))) for update in (1, 2, 12)}) == 3


def test_a_checkpoint_of_an_earlier_edition_is_refused(tmp_path) -> None:
    tensors = {"model/c": np.zeros((), np.float32)}
    (path := tmp_path / "update-00000012.safetensors").write_bytes(
        save(tensors, metadata={"gaudi_bert": "{}", "crc32": "1"})
    )
    assert is_checkpoint(path)
    with pytest.raises(InputError, match=r"update-00000012\.safetensors: written by an earlier edition; train again"):
        read_checkpoint(path)


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
        found = read_newest(tmp_path, warnings.append)
        assert_same(found, checkpoint)  # white space in the header, and nothing else, may change
        return
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert "\n" not in warnings[0]


def test_the_newest_whole_one_is_read_and_damage_is_told(tmp_path) -> None:
    assert read_newest(tmp_path, pytest.fail) is None
    for update in (10, 15):
        write_checkpoint(tmp_path, make(update))
    newest = tmp_path / "update-00000015.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    warnings: list[str] = []
    assert_same(read_newest(tmp_path, warnings.append), make(10))
    assert len(warnings) == 1
    assert "update-00000015.safetensors" in warnings[0]
    (tmp_path / "update-00000010.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="none of its 2 checkpoints can be read"):
        read_newest(tmp_path, warnings.append)


def test_only_the_newest_are_kept_and_the_newest_is_found(tmp_path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for update in (1, 2, 3, 10):
        write_checkpoint(folder, make(update))
    remove_old_checkpoints(folder, 2)
    assert [path.name for path in checkpoint_files(folder)] == ["update-00000003.safetensors", "update-00000010.safetensors"]
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(folder) == folder / "update-00000010.safetensors"


def test_a_missing_checkpoint_is_one_line(tmp_path) -> None:
    with pytest.raises(InputError, match="no checkpoint there"):
        find_checkpoint(tmp_path)
    with pytest.raises(InputError, match="no such checkpoint"):
        read_checkpoint(tmp_path / "update-00000001.safetensors")
