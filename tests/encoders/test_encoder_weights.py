"""A model is read with exactly the weights of its folder, or refused; what `transformers` prints meanwhile is not shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import InputError

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from gaudi_bert.encoders.encoder_weights import read_model  # noqa: E402
from tests.builders.agree import agree  # noqa: E402
from tests.builders.encoders import LABELS, write_encoder  # noqa: E402

Tensors = dict[str, Any]
CLASSIFIER = "AutoModelForSequenceClassification"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder of a model whose stored tensors were changed."""

    def write(change: Callable[[Tensors], object], name: str = "roberta", kind: str = CLASSIFIER, **config: Any) -> Path:
        folder = tmp_path / "m"
        shutil.rmtree(folder, ignore_errors=True)
        write_encoder(folder, name, kind, **({} if kind == "AutoModel" else LABELS))
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**content, **config}), encoding="utf-8")
        return folder

    return write


def opened(folder: Path, kind: str = CLASSIFIER) -> Any:
    return read_model(folder, getattr(transformers, kind))


def test_each_missing_weight_is_named(changed: Callable[..., Path]) -> None:
    names = sorted(load_file(changed(lambda _: None) / "model.safetensors"))
    for name in names[::17]:
        with pytest.raises(InputError, match=f"m: the weight files do not contain {name}, which config.json requires; copy"):
            opened(changed(lambda tensors, name=name: tensors.pop(name)))


def test_a_head_that_was_never_trained_is_refused_and_the_encoder_is_not(changed: Callable[..., Path]) -> None:
    folder = changed(lambda _: None, kind="AutoModelForMaskedLM")
    with pytest.raises(InputError, match=r"m: the weight files do not contain classifier\.dense\.bias"):
        opened(folder)
    opened(changed(lambda tensors: tensors.update({"roberta.pooler.dense.bias": torch.ones(32)})))  # nobody reads it
    folder = changed(lambda _: None, kind="AutoModelForMaskedLM")
    encoder = opened(folder, "AutoModel")  # without a pooler, and without the head of the folder
    with torch.no_grad():
        expected = opened(folder, "AutoModelForMaskedLM").roberta(torch.arange(3, 20)[None])[0]
        agree(encoder(torch.arange(3, 20)[None])[0].numpy(), expected.numpy(), 1e-6, scale=1.0)


@pytest.mark.parametrize("kind", ["AutoModel", CLASSIFIER])
def test_superfluous_weights_are_refused(changed: Callable[..., Path], kind: str) -> None:
    with pytest.raises(
        InputError, match=r"m: the weight files contain .*layer\.2\..*, which does not belong to the model of config.json"
    ):
        opened(changed(lambda _: None, kind=kind, num_hidden_layers=2), kind)
    with pytest.raises(InputError, match=r"m: the weight files contain adapter\.weight"):
        opened(changed(lambda tensors: tensors.update({"adapter.weight": torch.ones(3)}), kind=kind), kind)


def test_two_tensors_for_one_parameter_are_refused(changed: Callable[..., Path]) -> None:
    name = "roberta.embeddings.LayerNorm"
    for old, new in (("gamma", "weight"), ("beta", "bias")):
        folder = changed(lambda tensors, old=old: tensors.update({f"{name}.{old}": torch.ones(32)}))
        with pytest.raises(
            InputError, match=f"m: {name}.{old} and {name}.{new} are two names for the same weight; remove one"
        ):
            opened(folder)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (
            lambda _: None,
            {"vocab_size": 301},
            r"word_embeddings.weight has shape \[300, 32\], but config.json requires \[301, 32\]",
        ),
        (lambda tensors: tensors["classifier.dense.bias"].fill_(float("nan")), {}, "classifier.dense.bias contains NaN"),
        (lambda _: None, {"max_position_embeddings": 2**30}, r"a model of [\d,]+ weights, but the weight files"),
        (
            lambda _: None,
            {"num_hidden_layers": 2**64 + 1},
            "num_hidden_layers must be at most 1,024, but is 18446744073709551617",
        ),
        (lambda _: None, {"hidden_size": 0}, "transformers cannot load the model: the settings contradict each other; copy"),
        (lambda _: None, {"architectures": {"a": 1}, "model_type": 3}, "transformers cannot load the model"),
    ],
)
def test_damage_is_one_line(changed: Callable[..., Path], change: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        opened(changed(change, **config))
    assert str(error.value).startswith(str(changed(change)))


@pytest.mark.parametrize(
    ("size", "message"),
    [(7, "contain only 7 bytes; copy"), (50_000, "transformers cannot load the model: .*; copy the")],
)
def test_a_file_of_weights_that_was_cut(changed: Callable[..., Path], size: int, message: str) -> None:
    file = changed(lambda _: None) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match=message):
        opened(file.parent)
    file.unlink()
    with pytest.raises(InputError, match=r"transformers cannot load the model: .* no file named model\.safetensors"):
        opened(file.parent)


def test_nothing_is_printed_and_the_library_stays_as_it_was(
    changed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, library = changed(lambda _: None), transformers.utils.logging
    before = library.get_verbosity(), library.is_progress_bar_enabled()
    capfd.readouterr()
    opened(folder, "AutoModel")
    assert capfd.readouterr() == ("", "")
    assert (library.get_verbosity(), library.is_progress_bar_enabled()) == before
