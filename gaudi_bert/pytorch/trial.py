"""Packs of random tokens, and what a model makes of them: each sequence alone, and all of them packed.

Letters: B packs, L positions, H outputs of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import huggingface_hub.errors
import numpy as np
import torch

from gaudi_bert.common.arrays import AnyArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch.feeding import Feeding
from gaudi_bert.pytorch.rows import Row

ALONE_BOUND = 1e-5
"""Allowed difference between packed and alone, of the largest output or 1, whichever is larger."""
NEIGHBOUR_BOUND = 1e-6
"""The same for what a changed neighbour may change."""
SHARES = ((0.38, 0.31, 0.24), (0.55, 0.4), (0.97,))
MODEL_ERRORS = (
    InputError,
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    ImportError,
    AssertionError,
    NotImplementedError,
    ZeroDivisionError,
    getattr(huggingface_hub.errors, "StrictDataclassError", ValueError),  # of configs, in newer versions
)
"""What a model of others raises where its input or its config does not suit it."""


def one_line(error: BaseException, most: int = 120) -> str:
    """An error of another library in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


@contextmanager
def trial_conditions() -> Iterator[None]:
    """Without gradients and without compilation, which flex attention does for every length: what is tried is the mask, not
    the kernel. On one thread: a few tokens take less time than the threads that would wait for one another.
    """
    # Stances are there from PyTorch 2.6 on.
    stance = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), stance:
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def trial_of(model: Any) -> Iterator[None]:
    """For running a model as it is: in evaluation mode, without gradients; what it raises is said in one line."""
    was_training = model.training
    model.eval()
    try:
        with trial_conditions():
            yield
    except MODEL_ERRORS as error:
        raise InputError(f"{type(model).__name__}: cannot be tried: {one_line(error)}") from error
    finally:
        model.train(was_training)


def tokens_of_packs(config: Any, offset: int, wanted: int = 144) -> int:
    """As many as wanted (more than short windows and blocks hold), or as there are positions from `offset` on."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = min(wanted, most - offset) if type(most) is int else wanted
    if length < 16:
        raise InputError(f"max_position_embeddings = {most}: at least 16 positions are needed to try packs")
    return length


def random_packs(config: Any, length: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Packs of random tokens, and the same with all tokens of the first sequence of each changed."""
    tokens = usual_tokens(config)
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    changed: list[Row] = []
    for shares in SHARES:
        lengths = np.array([int(share * length) for share in shares])
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        pads = length - len(numbers)
        chosen = random.integers(0, len(tokens), len(numbers))
        row = {
            "input_ids": np.pad(tokens[chosen], (0, pads)),
            "token_type_ids": np.pad(np.concatenate([np.arange(n) >= n // 2 for n in lengths]).astype(int), (0, pads)),
            "position_ids": np.concatenate([np.arange(n) for n in (*lengths, pads)]),
            "sequence_ids": np.pad(numbers, (0, pads)),
            "seq_lens": lengths,
        }
        other = tokens[np.where(numbers == 1, (chosen + 1) % len(tokens), chosen)]
        rows.append(row)
        changed.append({**row, "input_ids": np.pad(other, (0, pads))})
    return rows, changed


def usual_tokens(config: Any) -> AnyArray:
    """Token ids that mean nothing special: not among the first, and not named in the config."""
    text = config.get_text_config()
    named = {
        value for each in (config, text) for name, value in vars(each).items() if "token" in name and isinstance(value, int)
    }
    tokens = np.setdiff1d(np.arange(min(5, text.vocab_size // 2), text.vocab_size), [*named])
    if len(tokens) < 2:
        raise InputError(f"vocab_size = {text.vocab_size}: at least two tokens beside the special ones are needed")
    return tokens


def alone_outputs(model: Any, feeding: Feeding, rows: Sequence[Row]) -> list[torch.Tensor]:
    """The outputs of each sequence in a batch of its own, fed as everybody feeds a sequence."""
    outputs = []
    for row in rows:
        for number in range(1, len(row["seq_lens"]) + 1):
            chosen = row["sequence_ids"] == number
            inputs = {"input_ids": row["input_ids"][chosen]}
            if feeding.token_types:
                inputs["token_type_ids"] = row["token_type_ids"][chosen]
            outputs.append(outputs_of(model, {name: torch.tensor(values)[None] for name, values in inputs.items()})[0])
    return outputs


def outputs_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The first output, one vector for each token: float32 [B, L, H]."""
    weights = next(model.parameters())
    output = model(**on_device(batch, weights.device, weights.dtype))[0]
    if not isinstance(output, torch.Tensor) or output.ndim != 3 or output.shape[:2] != batch["input_ids"].shape:
        raise InputError(
            f"{type(model).__name__}: its output is not one vector per token; give an encoder or a causal model"
        )
    return output.float().cpu()


def on_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """A batch, or what is in it, on a device; its masks of numbers in a `dtype`."""
    if isinstance(value, dict):
        return {name: on_device(each, device, dtype) for name, each in value.items()}
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(device, dtype)
    return value.to(device) if hasattr(value, "to") else value


def sequences_of(outputs: torch.Tensor, rows: Sequence[Row]) -> list[torch.Tensor]:
    """The outputs of each sequence, of packs [B, L, H] or of one flattened row [1, T, H]."""
    lengths = [row["seq_lens"].tolist() for row in rows]
    if outputs.shape[0] == 1:
        return list(outputs[0].split([length for row in lengths for length in row]))
    return [part for output, row in zip(outputs, lengths, strict=True) for part in output[: sum(row)].split(row)]


def largest_difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Over all outputs of all sequences; NaN where either has one."""
    return float(torch.stack([(one - other).abs().max() for one, other in zip(found, wanted, strict=True)]).max())


def scale_of(outputs: Sequence[torch.Tensor]) -> float:
    """The largest output, at least 1."""
    return max(1.0, *(float(output.abs().max()) for output in outputs))
