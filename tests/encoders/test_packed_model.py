"""Heads over packs: what reads more than its own text is refused. Folders of `transformers` that are verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.training.verify_model import verify_model
from tests.builders.reporters import QUIET

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers", minversion="5")

from gaudi_bert.encoders import packed_model  # noqa: E402
from gaudi_bert.pytorch import PackCollator, PackedEncoder  # noqa: E402
from tests.builders.encoders import LABELS, TOKENIZER, write_encoder  # noqa: E402
from tests.encoders.test_pack_inputs_trial import BERT, WIDTH, random_model  # noqa: E402


class Recurrent(torch.nn.LSTM):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)[0]


class Convolution(torch.nn.Conv1d):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


READS_ALL = {"classifier_pooling": "mean"}  # of a ModernBERT: its head of texts reads all tokens of each
MIXES = "BertForTokenClassification: (the model computes wrong outputs for packs of 144|the head's outputs for packed)"
USES = {
    "collator": lambda model: PackCollator("transformers-5", model),
    "encoder": lambda model: PackedEncoder(model, TOKENIZER),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    "head",
    [lambda: Recurrent(WIDTH, 2, bidirectional=True, batch_first=True), lambda: Convolution(WIDTH, 4, 3, padding=1)],
    ids=["recurrent", "convolution"],
)
def test_a_head_that_mixes_tokens_is_refused(head: Callable, use: Callable) -> None:
    model = random_model("BertForTokenClassification", "Bert", **BERT, num_labels=4)
    use(model)
    model.classifier = head()
    with pytest.raises(InputError, match=MIXES):
        use(model)


# --- `verify-model` on folders: packs are what their sequences are alone, or the model is refused


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("modernbert", "AutoModel", {"outputs", "gradient"}),
        ("roberta", "AutoModelForTokenClassification", {"outputs", "answers", "gradient"}),
        ("modernbert", "AutoModelForSequenceClassification", {"outputs", "answers", "gradient"}),
    ],
)
def test_outputs_gradients_and_answers(name: str, kind: str, found: set[str], tmp_path: Path) -> None:
    write_encoder(tmp_path / "m", name, kind, **({**LABELS, **READS_ALL} if "answers" in found else {}))
    result = verify_model(checkpoint=tmp_path / "m", reporter=QUIET)
    assert set(result.differences) == found
    assert max(result.differences.values()) < 1e-4
    assert (result.packs, result.sequences, result.leak_comparisons) == (3, 6, 3)


def test_a_model_that_packs_are_not_right_for_fails(tmp_path: Path) -> None:
    write_encoder(tmp_path / "m", "deberta", "AutoModel")
    with pytest.raises(FailedError, match="deberta"):
        verify_model(checkpoint=tmp_path / "m", reporter=QUIET)


def test_a_gradient_of_packs_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_encoder(tmp_path / "m", "roberta", "AutoModel")
    right = packed_model.compute_outputs_without_packing

    def damped(*inputs: Any) -> list[torch.Tensor]:
        return [each / 2 + each.detach() / 2 for each in right(*inputs)]

    monkeypatch.setattr(packed_model, "compute_outputs_without_packing", damped)
    with pytest.raises(FailedError, match="gradients"):
        verify_model(checkpoint=tmp_path / "m", reporter=QUIET)
