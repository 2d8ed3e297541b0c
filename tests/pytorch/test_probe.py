"""The leak probe: `PackCollator` feeds each model right, the planted leaks are found, and the command refuses what leaks."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gaudi_bert.cli.main import app
from gaudi_bert.common.errors import FailedError, InputError

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("transformers")

from gaudi_bert.pytorch import probe_model  # noqa: E402
from gaudi_bert.pytorch.trial import ALONE_BOUND  # noqa: E402
from tests.builders.effort import LONG  # noqa: E402
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


@pytest.mark.repeated
@pytest.mark.parametrize("name", ["bert", "modernbert"] if LONG else ["modernbert"])
def test_flex_attention(name: str) -> None:
    flex, positions = probe_model(small_model(name, "flex_attention"), ["flex", "positions only"])
    assert flex.is_right
    assert flex.alone <= ALONE_BOUND
    assert "LEAKS" in positions.verdict


def test_forms_that_this_software_does_not_take_are_refused() -> None:
    assert not any(finding.is_right for finding in probe_model(small_model("bert", "sdpa"), ["transformers-4", "flash"]))


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
