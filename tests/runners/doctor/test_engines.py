"""Which engine can run, and why the other cannot."""

from __future__ import annotations

import pytest

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.doctor.host import Packages, check_engines, engine_states

BOTH = Packages(tensorflow="2.15.1", torch="2.13.0", transformers="5.23.0")
BRIDGE = {"tensorflow": "", "pytorch": "1.24.0.481"}


@pytest.mark.parametrize(
    ("packages", "on_cards", "verdict", "found"),
    [
        (BOTH, False, "ok", "tensorflow runs (TensorFlow 2.15.1); pytorch runs (PyTorch 2.13.0)"),
        (
            Packages((3, 12), torch="2.13.0", transformers="5.23.0"),
            False,
            "ok",
            "tensorflow does not run (TensorFlow 2.15 has no version for Python 3.12); pytorch runs (PyTorch 2.13.0)",
        ),
        (
            Packages(tensorflow="2.15.1"),
            False,
            "ok",
            "tensorflow runs (TensorFlow 2.15.1); pytorch does not run (PyTorch is not installed)",
        ),
        (Packages(torch="2.13.0"), False, "ok", "pytorch runs (PyTorch 2.13.0, BERT only: transformers is not installed)"),
        (
            Packages((3, 10), tensorflow="2.16.1"),
            False,
            "warning",
            "tensorflow does not run (TensorFlow is 2.16.1, and 2.15 is needed); pytorch does not run (PyTorch is not "
            "installed); estimate, pack, verify and import need neither",
        ),
        (
            BOTH,
            True,
            "warning",
            "tensorflow does not run (habana_frameworks.tensorflow is not installed, which the cards need); "
            "pytorch does not run (habana_frameworks.torch is not installed, which the cards need)",
        ),
        (
            Packages(torch="2.10.0", transformers="5.23.0", bridges=BRIDGE),
            True,
            "ok",
            "tensorflow does not run (TensorFlow is not installed); pytorch runs (PyTorch 2.10.0)",
        ),
    ],
)
def test_what_can_run_and_why_the_rest_cannot(packages: Packages, on_cards: bool, verdict: str, found: str) -> None:
    result = check_engines(packages, load_pipeline(None), on_cards=on_cards)
    assert (result.check, result.verdict) == ("engines", verdict)
    assert found in result.found
    assert bool(result.remedy) == (verdict == "warning")
    assert "--on docker" in result.remedy or verdict == "ok"


@pytest.mark.parametrize(
    ("engine", "verdict", "remedy"),
    [("auto", "ok", ""), ("pytorch", "ok", ""), ("tensorflow", "warning", "to train by tensorflow: python3.11 -m venv")],
)
def test_an_engine_that_is_named_must_run(monkeypatch: pytest.MonkeyPatch, engine: str, verdict: str, remedy: str) -> None:
    monkeypatch.setattr("sys.executable", "python3.12")
    monkeypatch.setattr("gaudi_bert.common.errors.has_tensorflow", lambda: False)
    settings = load_pipeline(None, [f"training.engine={engine}"])
    result = check_engines(Packages((3, 12), torch="2.13.0", transformers="5.23.0"), settings, on_cards=False)
    assert result.verdict == verdict
    assert result.remedy.startswith(remedy)


def test_on_cards_the_remedy_is_the_vendors_framework_not_that_of_a_cpu() -> None:
    for packages in (Packages((3, 12)), BOTH, Packages(bridges=BRIDGE)):
        (state,) = (state for state in engine_states(packages, on_cards=True) if state.name == "pytorch")
        assert state.remedy == "install habana-torch-plugin of the driver's release, with the vendor's framework"


def test_programs_are_told_the_same() -> None:
    told = {state.name: state.as_json() for state in engine_states(Packages((3, 12), torch="2.13.0"), on_cards=False)}
    assert told["pytorch"] == {"runs": True, "reason": "", "remedy": ""}
    assert told["tensorflow"]["runs"] is False
    assert told["tensorflow"]["reason"] == "TensorFlow 2.15 has no version for Python 3.12"
    assert told["tensorflow"]["remedy"]
