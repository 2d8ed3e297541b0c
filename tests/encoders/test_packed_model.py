"""Heads over packs: what reads more than its own text is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gaudi_bert.common.errors import InputError

torch = pytest.importorskip("torch", reason="PYTORCH MISSING: install the extra dev to test packs for PyTorch")
transformers = pytest.importorskip("transformers", minversion="5")

from gaudi_bert.pytorch import PackCollator, PackedEncoder  # noqa: E402
from tests.builders.encoders import TOKENIZER  # noqa: E402
from tests.encoders.test_feeding_trial import BERT, WIDTH, random_model  # noqa: E402


class Recurrent(torch.nn.LSTM):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)[0]


class Convolution(torch.nn.Conv1d):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


MIXES = "BertForTokenClassification: (computes wrong outputs for packs of 144|its head gives packed texts other answers)"
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
    with pytest.raises(InputError, match=MIXES) as caught:
        use(model)
    assert "\n" not in str(caught.value)
