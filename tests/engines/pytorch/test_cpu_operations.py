"""Losses, gradients of tables and dropout on a CPU are those that PyTorch computes by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gaudi_bert.engines.pytorch import cpu_operations
from tests.builders.agree import agree, agree_with_gradients


@pytest.mark.parametrize(("rows", "classes", "together"), [(1, 1, 1), (7, 31, 64), (13, 5, 1 << 18)])
def test_losses_some_rows_at_a_time(rows: int, classes: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_operations, "_TILE_ELEMENTS", together)
    random = torch.Generator().manual_seed(rows)
    logits = (30 * torch.randn(rows, classes, generator=random)).requires_grad_()
    labels = torch.randint(classes, (rows,), generator=random)
    right = partial(torch.nn.functional.cross_entropy, reduction="none")
    agree_with_gradients(cpu_operations.cross_entropy, right, logits, labels)


@pytest.mark.parametrize("used", ["looked up", "multiplied", "both"])
def test_gradients_of_a_table_that_is_looked_up_and_multiplied(used: str) -> None:
    table = torch.randn(11, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found, rows = [], torch.tensor([4, 0, 4, 10])
    for to_look_up, to_multiply in (cpu_operations.DuplicateTiedEmbedding.apply(table), (table, table)):
        picked = torch.nn.functional.embedding(rows, to_look_up, sparse=to_look_up is not table)
        parts = {"looked up": picked.square().sum(), "multiplied": (picked.detach() @ to_multiply.t()).square().sum()}
        loss = sum(parts.values()) if used == "both" else parts[used]
        found.append(torch.autograd.grad(loss, table)[0])
    agree(found[0].numpy(), found[1].numpy(), 1e-6)


def test_dropout_drops_the_share_it_should() -> None:
    torch.manual_seed(5)
    dropped = cpu_operations.dropout(torch.ones(997, 1009), 0.1)
    assert abs(float((dropped == 0).double().mean()) - 0.1) < 0.002
    agree(dropped[dropped > 0].numpy(), [1 / 0.9] * int((dropped > 0).sum()), 1e-4)
