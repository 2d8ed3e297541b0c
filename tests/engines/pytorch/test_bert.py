"""Attention in each of its forms is that by products: for any masks, causal or not, with dropout and without."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gaudi_bert.engines.pytorch import cpu_operations
from gaudi_bert.engines.pytorch.bert import (
    Attention,
    _fused_attention,
    _make_additive_attention_mask,
    _plain_attention,
    compute_sequence_offsets,
    supports_varlen_attention,
    varlen_attention,
)
from gaudi_bert.engines.pytorch.cpu_operations import tiled_attention
from tests.builders.agree import agree, agree_with_gradients

LENGTH, PACKS, HEADS, SIZE = 67, 2, 3, 8


def masks(sequences: int) -> torch.Tensor:
    """Packs of so many sequences of about one length, the second pack with padding at its end."""
    numbers_L = torch.arange(LENGTH) * sequences // LENGTH + 1
    padded_L = torch.where(torch.arange(LENGTH) < LENGTH - 5, numbers_L, 0)
    return torch.stack([numbers_L, padded_L])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sequences", [1, 3, 32])
def test_outputs_and_gradients_of_both_forms(sequences: int, causal: bool) -> None:
    random = torch.Generator().manual_seed(sequences)
    inputs = [torch.randn(PACKS, HEADS, LENGTH, SIZE, generator=random, requires_grad=True) for _ in range(3)]
    bias = _make_additive_attention_mask(masks(sequences), causal, torch.float32)
    fused, tiled, plain = (
        partial(form, bias_B1PL=bias, dropout_rate=0.0) for form in (_fused_attention, tiled_attention, _plain_attention)
    )
    agree_with_gradients(fused, plain, *inputs)
    agree_with_gradients(tiled, plain, *inputs)
    changed = [tensor.detach().clone() for tensor in inputs]
    for tensor in changed[1:]:
        tensor[0, :, masks(sequences)[0] != 1] += 1.0  # all but the first sequence
    own = masks(sequences)[0] == 1
    before, moved = fused(*inputs), fused(*changed)
    assert torch.equal(moved[0, :, own], before[0, :, own]), "a neighbour is not seen, not by one bit"


@pytest.mark.parametrize("together", [1, 2 * LENGTH**2, 1 << 18])
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_attention_of_some_heads_at_a_time(rate: float, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers drop the same shares; and what is saved is right for the backward pass."""
    monkeypatch.setattr(cpu_operations, "_TILE_ELEMENTS", together)
    random = torch.Generator().manual_seed(1)
    shape = (PACKS, LENGTH, HEADS, SIZE)
    inputs = [torch.randn(shape, generator=random).transpose(1, 2).requires_grad_() for _ in range(3)]
    bias = _make_additive_attention_mask(masks(3), False, torch.float32)

    def attend(form: Attention, *inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return form(*inputs, bias, rate).transpose(1, 2)

    agree_with_gradients(partial(attend, tiled_attention), partial(attend, _plain_attention), *inputs)


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    """With the identity as values, the context is the shares themselves: dropped ones are 0, the others are scaled up.

    The fused form is PyTorch's, and the one in the cache drops the same shares.
    """
    tokens, rate, seeds = 5, 0.2, 2000
    random = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 1, tokens, tokens, generator=random) for _ in range(2))
    values, bias = torch.eye(tokens)[None, None], torch.zeros(1, 1, tokens, tokens)
    exact, drawn = _plain_attention(query, key, values, bias, 0.0), []
    for seed in range(seeds):
        torch.manual_seed(seed)
        drawn.append(_plain_attention(query, key, values, bias, rate))
    shares = torch.stack(drawn)
    scaled = exact / (1 - rate)
    assert bool(((shares == 0) | ((shares - scaled).abs() < 1e-4 * scaled)).all())
    deviation = (rate / (1 - rate) / seeds) ** 0.5  # of the mean of a share, in parts of it
    assert float(((shares.mean(0) - exact) / exact).abs().max()) < 5 * deviation
    assert abs(float((shares == 0).double().mean()) - rate) < 5 * (rate * (1 - rate) / shares.numel()) ** 0.5
    torch.manual_seed(3)
    assert torch.equal(_plain_attention(query, key, values, bias, rate), shares[3]), "the seed of the pass decides"


def test_sequence_offsets_of_a_complete_scenario() -> None:
    mask_BL = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 0, 0, 0]], np.int32)
    offsets = compute_sequence_offsets(mask_BL)
    assert offsets.dtype == np.int32
    assert offsets.tolist() == [0, 2, 5, 6, 12, 13, 14, 15, 18]


@given(st.lists(st.lists(st.integers(1, 5), max_size=6), min_size=1, max_size=4), st.integers(0, 3))
def test_sequence_offsets_are_those_of_the_lengths(packs: list[list[int]], padding: int) -> None:
    length = max(1, max(map(sum, packs)) + padding)
    mask_BL, expected = np.zeros((len(packs), length), np.int32), []
    for number, lengths in enumerate(packs):
        start = 0
        for sequence, tokens in enumerate(lengths, 1):
            expected.append(number * length + start)
            mask_BL[number, start : start + tokens] = sequence
            start += tokens
        if start < length:
            expected.append(number * length + start)
    assert compute_sequence_offsets(mask_BL).tolist() == [*expected, mask_BL.size]


@pytest.mark.skipif(
    not torch.cuda.is_available() or not supports_varlen_attention(torch.device("cuda"), SIZE),
    reason="FlashAttention needs a GPU of compute capability 8.0 or higher",
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sequences", [1, 3, 32])
def test_varlen_attention_equals_the_plain_form_and_repeats_its_bits(sequences: int, causal: bool) -> None:
    random, mask_BL = torch.Generator().manual_seed(sequences), masks(sequences)
    fused = torch.randn(PACKS * LENGTH, 3, HEADS, SIZE, generator=random).cuda().bfloat16().requires_grad_()
    weights = torch.randn(PACKS * LENGTH, HEADS, SIZE, generator=random).cuda()
    offsets = torch.from_numpy(compute_sequence_offsets(mask_BL.numpy())).cuda()

    def plain(fused: torch.Tensor) -> torch.Tensor:
        parts = [part.reshape(PACKS, LENGTH, HEADS, SIZE).transpose(1, 2).float() for part in fused.unbind(1)]
        context_BNLD = _plain_attention(*parts, _make_additive_attention_mask(mask_BL, causal, torch.float32).cuda(), 0.0)
        return context_BNLD.transpose(1, 2).reshape(-1, HEADS, SIZE)

    def varlen(fused: torch.Tensor, rate: float = 0.0) -> torch.Tensor:
        return varlen_attention(*fused.unbind(1), offsets, LENGTH, rate, causal).float()

    found = []
    for form in (plain, varlen):
        context = form(fused)
        found.append([context.detach().cpu(), torch.autograd.grad((context * weights).sum(), fused)[0].float().cpu()])
    for expected, ours in zip(*found, strict=True):
        agree(ours.numpy(), expected.numpy(), 0.02)  # bfloat16 has eight bits
    twice = []
    torch.use_deterministic_algorithms(True)
    for _ in range(2):
        torch.cuda.manual_seed(5)
        context = varlen(fused, 0.25)
        twice.append([context.detach().cpu(), torch.autograd.grad((context * weights).sum(), fused)[0].cpu()])
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, second) for first, second in zip(*twice, strict=True))
