"""Which engine computes a run, and why."""

from __future__ import annotations

import pytest

from gaudi_bert import engines
from gaudi_bert.common.errors import InputError
from gaudi_bert.engines import choose_engine


@pytest.mark.parametrize(
    ("requested", "is_bert", "stored", "installed", "expected", "reason"),
    [
        ("auto", True, None, ("tensorflow", "pytorch"), "tensorflow", "TensorFlow is installed, and the model is a BERT"),
        ("auto", False, None, ("tensorflow", "pytorch"), "pytorch", "the model is not a BERT"),
        ("auto", True, None, ("pytorch",), "pytorch", "TensorFlow is not installed"),
        ("auto", True, "pytorch", ("tensorflow", "pytorch"), "pytorch", "the run started with this engine"),
        ("tensorflow", True, "pytorch", ("tensorflow",), "tensorflow", "as requested"),
    ],
)
def test_which_engine_and_why(monkeypatch, requested, is_bert, stored, installed, expected, reason) -> None:
    monkeypatch.setattr(engines, "is_installed", lambda name: name in installed)
    chosen = choose_engine(requested, is_bert=is_bert, previous_engine=stored)
    assert chosen == (expected, reason)
    assert chosen.format_choice() == f"engine {expected}: {reason}"


@pytest.mark.parametrize(
    ("installed", "vendor_module", "expected"),
    [
        (("tensorflow", "pytorch"), None, "pytorch"),
        (("tensorflow",), None, "tensorflow"),
        (("tensorflow", "pytorch"), "habana_frameworks.tensorflow", "tensorflow"),  # PyTorch would not find the card
        (("tensorflow", "pytorch"), "habana_frameworks.torch", "pytorch"),
    ],
)
def test_inference_prefers_pytorch_unless_the_card_needs_tensorflow(monkeypatch, installed, vendor_module, expected) -> None:
    monkeypatch.setattr(engines, "is_installed", lambda name: name in installed)
    found = {vendor_module, (vendor_module or "").partition(".")[0]}
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: name if name in found else None)
    assert choose_engine("auto", preferred="pytorch").name == expected


@pytest.mark.parametrize(
    ("requested", "is_bert", "installed", "message"),
    [
        ("auto", True, (), r"engine pytorch: .*\(TensorFlow is not installed\); run: .*pytorch"),
        ("auto", False, ("tensorflow",), "engine pytorch: .*not a BERT.*run: "),
        ("pytorch", True, ("tensorflow",), "engine pytorch: .*set training.engine to tensorflow"),
        ("tensorflow", True, ("pytorch",), "engine tensorflow: .*set training.engine to pytorch"),
        ("tensorflow", False, ("tensorflow",), "training.engine = tensorflow: .*BERT"),
    ],
)
def test_an_engine_that_cannot_run_is_one_line(monkeypatch, requested, is_bert, installed, message) -> None:
    monkeypatch.setattr(engines, "is_installed", lambda name: name in installed)
    with pytest.raises(InputError, match=message):
        choose_engine(requested, is_bert=is_bert)
