"""`verify-model` on folders of `transformers`: packs are what their sequences are alone, or the model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.training.verify_model import verify_model
from tests.builders.reporters import QUIET

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
pytest.importorskip("transformers")

from gaudi_bert.encoders import feeding_trial, packed_model, verify  # noqa: E402
from tests.builders.encoders import LABELS, write_encoder  # noqa: E402


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("modernbert", "AutoModel", {"outputs", "gradient"}),
        ("roberta", "AutoModelForTokenClassification", {"outputs", "answers", "gradient"}),
    ],
)
def test_outputs_gradients_and_answers(name: str, kind: str, found: set[str], tmp_path: Path) -> None:
    write_encoder(tmp_path / "m", name, kind, **(LABELS if "answers" in found else {}))
    result = verify_model(checkpoint=tmp_path / "m", data=None, reporter=QUIET)
    assert set(result.differences) == found
    assert max(result.differences.values()) < 1e-4
    assert (result.packs, result.sequences, result.leak_comparisons) == (3, 6, 3)


def test_a_model_that_packs_are_not_right_for_fails(tmp_path: Path) -> None:
    write_encoder(tmp_path / "m", "deberta", "AutoModel")
    with pytest.raises(FailedError, match="deberta"):
        verify_model(checkpoint=tmp_path / "m", data=None, reporter=QUIET)


def test_a_gradient_of_packs_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_encoder(tmp_path / "m", "roberta", "AutoModel")
    right = verify.alone_outputs

    def damped(*inputs: Any) -> list[torch.Tensor]:
        return [each / 2 + each.detach() / 2 for each in right(*inputs)]

    monkeypatch.setattr(verify, "alone_outputs", damped)
    with pytest.raises(FailedError, match="gradients"):
        verify_model(checkpoint=tmp_path / "m", data=None, reporter=QUIET)


def test_a_leaking_mask_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_encoder(tmp_path / "m", "roberta", "AutoModel")
    right = feeding_trial.packed_batch
    monkeypatch.setattr(packed_model, "packed_batch", lambda *given: {**right(*given), "attention_mask": None})
    with pytest.raises(FailedError, match="Roberta"):
        verify_model(checkpoint=tmp_path / "m", data=None, reporter=QUIET)


def test_packed_data_are_not_for_a_folder_of_transformers(tmp_path: Path) -> None:
    write_encoder(tmp_path / "m", "roberta", "AutoModel")
    with pytest.raises(InputError, match="data"):
        verify_model(checkpoint=tmp_path / "m", data=tmp_path / "data", reporter=QUIET)
