"""The leak probe: `PackCollator` feeds each model right, the planted leaks are found, and the command refuses what leaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gaudi_bert.cli.main import app
from gaudi_bert.common.errors import InputError

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("transformers")

from gaudi_bert.pytorch import probe_model  # noqa: E402
from gaudi_bert.pytorch.probe import ALONE_BOUND  # noqa: E402
from tests.builders.torch_models import MODELS, small_model  # noqa: E402

ENCODERS = ("bert", "roberta", "distilbert", "modernbert")


def found(name: str, attention: str, *ways: str) -> dict:
    return {each.way: each for each in probe_model(small_model(name, attention), ways)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_is_alone_through_the_collator(name: str, attention: str) -> None:
    finding = found(name, attention, "transformers-5")["transformers-5"]
    assert finding.alone <= ALONE_BOUND
    assert finding.neighbour == 0
    assert finding.is_right


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_packed_is_alone_with_flex_attention(name: str) -> None:
    findings = found(name, "flex_attention", "flex", "positions only")
    assert findings["flex"].is_right
    assert findings["flex"].alone <= ALONE_BOUND
    assert "LEAKS" in findings["positions only"].verdict


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_positions_alone_and_numbers_leak(name: str, attention: str) -> None:
    findings = found(name, attention, "positions only", "2-D mask of sequence numbers")
    for finding in findings.values():
        assert finding.neighbour > 1e-2
        assert "LEAKS" in finding.verdict


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_a_bool_mask_leaks_where_it_is_added(name: str) -> None:
    assert "LEAKS" in found(name, "eager", "4-D bool mask")["4-D bool mask"].verdict
    assert found(name, "sdpa", "4-D bool mask")["4-D bool mask"].is_right


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_roberta_with_positions_from_0_is_wrong(attention: str) -> None:
    way = "additive mask, positions from 0"
    finding = found("roberta", attention, way)[way]
    assert not finding.is_right
    assert finding.alone > 1e-2
    assert "positions or windows are wrong" in finding.verdict
    assert found("bert", attention, way)[way].is_right


def test_forms_that_this_software_does_not_take_are_refused() -> None:
    findings = found("bert", "sdpa", "transformers-4", "flash")
    assert not findings["transformers-4"].is_right
    assert not findings["flash"].is_right


def test_an_unknown_way_is_named() -> None:
    with pytest.raises(InputError, match="way of feeding 'flush': known are transformers-5"):
        probe_model(small_model("bert", "sdpa"), ["flush"])


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
    assert "(roberta, eager): packs are treated right when fed as transformers-5" in good.output
    everything = run("--huggingface", str(folder), "--json")
    assert everything.exit_code == 0
    assert '"right": ["transformers-5", "4-D bool mask"]' in everything.stdout
    assert "positions only: LEAKS" in everything.output
    from gaudi_bert.common.errors import FailedError

    bad = run("--huggingface", str(folder), "--target", "flash")
    assert isinstance(bad.exception, FailedError)
    assert "\n" not in str(bad.exception)
    assert "flash: LEAKS" in str(bad.exception)


def test_the_command_refuses_what_cannot_be(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    for arguments, message in [
        (["--huggingface", str(folder / "nothing")], "config.json: missing"),
        (["--huggingface", str(tmp_path)], "transformers cannot open it"),
        (["--huggingface", str(folder), "--target", "flush"], "way of feeding 'flush'"),
        (["--huggingface", str(folder), "--data", "x"], "leave --checkpoint and --data out"),
        (["--target", "flash"], "give its folder with --huggingface"),
    ]:
        refused = run(*arguments)
        assert isinstance(refused.exception, InputError)
        assert message in str(refused.exception)
        assert "\n" not in str(refused.exception)
