"""Which engine computes a run, and why."""

from __future__ import annotations

import pytest

from gaudi_bert.common.errors import InputError
from gaudi_bert.engines import choose
from gaudi_bert.engines.choose import choose_engine


@pytest.mark.parametrize(
    ("requested", "is_bert", "stored", "installed", "expected", "reason"),
    [
        ("auto", True, None, ("tensorflow", "pytorch"), "tensorflow", "TensorFlow is installed, and the model is a BERT"),
        ("auto", False, None, ("tensorflow", "pytorch"), "pytorch", "the model is not a BERT"),
        ("auto", True, None, ("pytorch",), "pytorch", "TensorFlow is not installed"),
        ("auto", True, "pytorch", ("tensorflow", "pytorch"), "pytorch", "the run began with it"),
        ("tensorflow", True, "pytorch", ("tensorflow",), "tensorflow", "as requested"),
    ],
)
def test_which_engine_and_why(monkeypatch, requested, is_bert, stored, installed, expected, reason) -> None:
    monkeypatch.setattr(choose, "is_installed", lambda name: name in installed)
    chosen = choose_engine(requested, is_bert=is_bert, stored=stored)
    assert chosen == (expected, reason)
    assert chosen.line() == f"engine {expected}: {reason}"


@pytest.mark.parametrize(
    ("requested", "is_bert", "installed", "message"),
    [
        ("auto", True, (), "PyTorch is not installed; run: .*pytorch"),
        ("auto", False, ("tensorflow",), "PyTorch is not installed, and the model is not a BERT; run: "),
        ("pytorch", True, ("tensorflow",), "training.engine = pytorch: PyTorch is not installed; run: .*or set it to tens"),
        ("tensorflow", True, ("pytorch",), "training.engine = tensorflow: TensorFlow"),
        ("tensorflow", False, ("tensorflow",), "training.engine = tensorflow: TensorFlow runs BERT only here"),
    ],
)
def test_an_engine_that_cannot_run_is_one_line(monkeypatch, requested, is_bert, installed, message) -> None:
    monkeypatch.setattr(choose, "is_installed", lambda name: name in installed)
    with pytest.raises(InputError, match=message) as caught:
        choose_engine(requested, is_bert=is_bert)
    assert "\n" not in str(caught.value)
