"""The leak probe: `PackCollator` feeds each model right, the planted leaks are found, and the command refuses what leaks. A
model is read with exactly the weights of its folder, or refused; what `transformers` prints meanwhile is not shown.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gaudi_bert.cli.main import app
from gaudi_bert.common.errors import FailedError, InputError

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from gaudi_bert.pytorch import load_model, probe_model  # noqa: E402
from gaudi_bert.pytorch.encoder_weights import read_model  # noqa: E402
from gaudi_bert.pytorch.trial import ALONE_BOUND  # noqa: E402
from tests.builders.agree import agree  # noqa: E402
from tests.builders.effort import LONG  # noqa: E402
from tests.builders.encoders import LABELS, write_encoder  # noqa: E402
from tests.builders.torch_models import MODELS, small_model  # noqa: E402

ENCODERS = ("bert", "roberta", "distilbert", "modernbert")
FROM_0 = "additive mask, positions from 0"


def expected(name: str, attention: str) -> dict[str, str]:
    """How the verdict on each way of feeding this model begins."""
    verdicts = {"transformers-5": "right"}
    if name in ENCODERS:
        verdicts |= {"positions only": "LEAKS", "2-D mask of sequence numbers": "LEAKS"}
    if name in ("bert", "roberta", "distilbert"):
        verdicts["4-D bool mask"] = "LEAKS" if attention == "eager" else "right"  # eager attention adds it
    if name in ("bert", "roberta"):
        verdicts[FROM_0] = "WRONG" if name == "roberta" else "right"
    return verdicts


@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in MODELS), ("bert", "eager"), ("gpt2", "eager")])
def test_each_way_of_feeding(name: str, attention: str) -> None:
    verdicts = expected(name, attention)
    for finding in probe_model(small_model(name, attention), verdicts):
        verdict = verdicts[finding.way]
        assert finding.verdict.startswith(verdict), finding
        assert finding.is_right == (verdict == "right")
        if verdict == "LEAKS":
            assert finding.neighbour > 1e-2
        if verdict == "WRONG":
            assert finding.alone > 1e-2
            assert "positions or windows are wrong" in finding.verdict
        if finding.way == "transformers-5":
            assert (finding.alone <= ALONE_BOUND, finding.neighbour) == (True, 0)


@pytest.mark.slow
@pytest.mark.repeated
@pytest.mark.parametrize("name", ["bert", "modernbert"] if LONG else ["modernbert"])
def test_flex_attention(name: str) -> None:
    flex, positions = probe_model(small_model(name, "flex_attention"), ["flex", "positions only"])
    assert flex.is_right
    assert flex.alone <= ALONE_BOUND
    assert "LEAKS" in positions.verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("roberta")
    small_model("roberta", "sdpa").save_pretrained(path)
    return path


def run(*arguments: str):
    return CliRunner().invoke(app, ["verify-model", *arguments])


def test_the_command_names_what_is_right_and_refuses_what_leaks(folder: Path) -> None:
    good = run("--huggingface", str(folder), "--target", "transformers-5", "--attention", "eager")
    assert good.exit_code == 0, good.output
    assert "(roberta, eager): packs are treated correctly when fed as transformers-5" in good.output
    everything = run("--huggingface", str(folder), "--json")
    assert everything.exit_code == 0
    assert '"right": ["transformers-5", "4-D bool mask"]' in everything.stdout
    assert "positions only: LEAKS" in everything.output
    bad = run("--huggingface", str(folder), "--target", "flash")
    assert isinstance(bad.exception, FailedError)
    assert "\n" not in str(bad.exception)
    assert "flash: LEAKS" in str(bad.exception)


def test_the_command_refuses_what_cannot_be(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    for arguments, message in [
        (["--huggingface", str(folder / "nothing")], "no such folder"),
        (["--huggingface", str(tmp_path)], "transformers cannot open it"),
        (["--huggingface", str(tmp_path / "list")], "is not an object with the settings of a model"),
        (["--huggingface", str(folder), "--target", "flush"], "way of feeding 'flush'"),
        (["--huggingface", str(folder), "--data", "x"], "leave --checkpoint and --data out"),
        (["--target", "flash"], "give its folder with --huggingface"),
    ]:
        refused = run(*arguments)
        assert isinstance(refused.exception, InputError)
        assert message in str(refused.exception)
        assert "\n" not in str(refused.exception)


# --- a model from its folder

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
    for name in names[::7]:
        with pytest.raises(InputError, match=f"m: the weights lack {name}, which the model of config.json has; copy"):
            opened(changed(lambda tensors, name=name: tensors.pop(name)))


def test_a_head_that_was_never_trained_is_refused_and_the_encoder_is_not(changed: Callable[..., Path]) -> None:
    folder = changed(lambda _: None, kind="AutoModelForMaskedLM")
    with pytest.raises(InputError, match=r"m: the weights lack classifier\.dense\.bias"):
        opened(folder)
    encoder = opened(folder, "AutoModel")  # without a pooler, and without the head of the folder
    with torch.no_grad():
        expected = load_model(folder).roberta(torch.arange(3, 20)[None])[0]
        agree(encoder(torch.arange(3, 20)[None])[0].numpy(), expected.numpy(), 1e-6, scale=1.0)


@pytest.mark.parametrize("kind", ["AutoModel", CLASSIFIER])
def test_superfluous_weights_are_refused(changed: Callable[..., Path], kind: str) -> None:
    with pytest.raises(InputError, match=r"m: the weights hold .*layer\.2\..*, which the model of config.json lacks"):
        opened(changed(lambda _: None, kind=kind, num_hidden_layers=2), kind)
    with pytest.raises(InputError, match=r"m: the weights hold adapter\.weight"):
        opened(changed(lambda tensors: tensors.update({"adapter.weight": torch.ones(3)}), kind=kind), kind)


def test_two_tensors_for_one_parameter_are_refused(changed: Callable[..., Path]) -> None:
    name = "roberta.embeddings.LayerNorm"
    for old, new in (("gamma", "weight"), ("beta", "bias")):
        folder = changed(lambda tensors, old=old: tensors.update({f"{name}.{old}": torch.ones(32)}))
        with pytest.raises(InputError, match=f"m: {name}.{old} and {name}.{new} are the same weights; leave out the one"):
            opened(folder)


def test_a_pooler_may_be_there_or_not(changed: Callable[..., Path]) -> None:
    opened(changed(lambda tensors: tensors.pop("pooler.dense.bias"), kind="AutoModel"), "AutoModel")
    pooler = {f"roberta.pooler.dense.{name}": torch.ones(32) for name in ("weight", "bias")}
    opened(changed(lambda tensors: tensors.update(pooler)))


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda _: None, {"vocab_size": 301}, r"word_embeddings.weight has the shape \[300, 32\], by .* it is \[301, 32\]"),
        (lambda tensors: tensors["classifier.dense.bias"].fill_(float("nan")), {}, "classifier.dense.bias is not finite"),
        (lambda _: None, {"max_position_embeddings": 2**30}, r"a model of [\d,]+ weights, and the files of weights"),
        (lambda _: None, {"num_hidden_layers": 2**64 + 1}, "num_hidden_layers = 18446744073709551617; at most 1,024"),
        (lambda _: None, {"max_position_embeddings": 2**64}, "max_position_embeddings = 18446744073709551616; at most"),
        (lambda _: None, {"hidden_size": 0}, "transformers cannot open it: its settings do not fit together; copy"),
        (lambda _: None, {"pad_token_id": 300}, "transformers cannot open it: its settings do not fit together; copy"),
        (lambda _: None, {"architectures": {"a": 1}, "model_type": 3}, "transformers cannot open it"),
    ],
)
def test_damage_is_one_line(changed: Callable[..., Path], change: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        opened(changed(change, **config))
    assert str(error.value).startswith(str(changed(change)))


@pytest.mark.parametrize(
    ("size", "message"),
    [(7, "the files of weights hold 7 bytes; copy"), (50_000, "transformers cannot open it: .*; copy the")],
)
def test_a_file_of_weights_that_was_cut(changed: Callable[..., Path], size: int, message: str) -> None:
    file = changed(lambda _: None) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match=message):
        load_model(file.parent)
    file.unlink()
    with pytest.raises(InputError, match=r"transformers cannot open it: .* no file named model\.safetensors"):
        load_model(file.parent)


def test_nothing_is_printed_and_the_library_stays_as_it_was(
    changed: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, library = changed(lambda _: None), transformers.utils.logging
    before = library.get_verbosity(), library.is_progress_bar_enabled()
    capfd.readouterr()
    opened(folder, "AutoModel")
    assert capfd.readouterr() == ("", "")
    assert (library.get_verbosity(), library.is_progress_bar_enabled()) == before
