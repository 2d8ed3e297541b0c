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
_SPECIAL_TOKENS = ("bos", "cls", "sep", "eos", "mask", "unk")
_LARGE = 10_000_000  # weights
_LOW_IDS = 128  # among which tokenizers have their special tokens: 0 to 4, 50 to 60, 100 to 103, ...
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
def trial_conditions(one_thread: bool = True) -> Iterator[None]:
    """Without gradients and without compilation, which flex attention does for every length: what is tried is the mask, not
    the kernel. On one thread: a few tokens take less time than the threads that would wait for one another, unless the model
    is large.
    """
    # Stances are there from PyTorch 2.6 on.
    stance = torch.compiler.set_stance("force_eager") if hasattr(torch.compiler, "set_stance") else nullcontext()
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if one_thread else threads)
    try:
        with torch.no_grad(), stance:
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def trial_of(model: Any) -> Iterator[None]:
    """For running a model as it is: in evaluation mode, without gradients; what it raises becomes one line.

    Afterwards its modules are in their modes again, and its buffers (statistics, for one) have their values.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.eval()
    try:
        with trial_conditions(sum(weights.numel() for weights in model.parameters()) < _LARGE):
            yield
    except MODEL_ERRORS as error:
        raise InputError(f"{type(model).__name__}: cannot be tried: {one_line(error)}{_remedy(model)}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _remedy(model: Any) -> str:
    """What to do about a setting with which a model takes no mask but one of two dimensions."""
    if getattr(model.config, "output_router_logits", False):
        return "; its load-balancing loss takes no mask of packs: set model.config.output_router_logits = False"
    return ""


def tokens_of_packs(config: Any, offset: int, most_tokens: int = 144) -> int:
    """At most `most_tokens` (more than short windows and blocks hold), and the positions from `offset` on."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = min(most_tokens, positions - offset) if type(positions) is int else most_tokens
    if length < 16:
        raise InputError(f"max_position_embeddings = {positions}: at least 16 positions are needed to try packs")
    return length


def random_packs(config: Any, length: int, seed: int, longest: int | None = None) -> tuple[list[Row], list[Row]]:
    """Packs of random tokens, and the same with all tokens of the first sequence of each changed.

    No sequence has more tokens than `longest`.
    """
    lengths = [[min(int(share * length), longest or length) for share in shares] for shares in SHARES]
    return _packs(config, length, lengths, seed)


def full_pack(config: Any, length: int, seed: int, longest: int | None = None) -> tuple[list[Row], list[Row]]:
    """One pack without padding, from long sequences to one of a single token, as `random_packs` has them.

    Whatever a model mixes over, some of it is in another sequence.
    """
    lengths, remaining = [], length
    while remaining:
        lengths.append(min((remaining + 1) // 2, longest or length))
        remaining -= lengths[-1]
    return _packs(config, length, [lengths], seed)


def _packs(config: Any, length: int, lengths_of_packs: Sequence[Sequence[int]], seed: int) -> tuple[list[Row], list[Row]]:
    tokens, random = _trial_tokens(config), np.random.default_rng(seed)
    turns = 1 + length * len(lengths_of_packs) // len(tokens)
    order = np.concatenate([random.permutation(len(tokens)) for _ in range(turns)])  # each token is there, if there is room
    rows: list[Row] = []
    changed: list[Row] = []
    for each in lengths_of_packs:
        lengths = np.array(each)
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        pads = length - len(numbers)
        chosen, order = np.split(order, [len(numbers)])
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
    """Ordinary token ids: not among the first, and not named in the config."""
    text = config.get_text_config()
    tokens = np.setdiff1d(np.arange(min(5, text.vocab_size // 2), text.vocab_size), [*_named_tokens(config)])
    if len(tokens) < 2:
        raise InputError(f"vocab_size = {text.vocab_size}: at least two tokens that are not special are needed")
    return tokens


def _named_tokens(config: Any) -> set[int]:
    configs = (config, config.get_text_config())
    return {value for each in configs for name, value in vars(each).items() if "token" in name and isinstance(value, int)}


def _trial_tokens(config: Any) -> AnyArray:
    """Token ids in which special ones are as many as usual ones: models may treat [SEP] or [MASK] apart.

    Padding is not among them, and no other token that a config names: it stands for an image, for one.
    """
    text, usual = config.get_text_config(), usual_tokens(config)
    given = [getattr(text, f"{name}_token_id", None) for name in _SPECIAL_TOKENS]
    ids = {one for each in given for one in (each if isinstance(each, list) else [each]) if type(one) is int}
    special = sorted(each for each in ids - {getattr(text, "pad_token_id", None)} if 0 <= each < text.vocab_size)
    low = np.setdiff1d(np.arange(min(_LOW_IDS, text.vocab_size)), [*_named_tokens(config)])
    return np.concatenate([np.tile(np.array(special, int), 8), low, usual[usual >= _LOW_IDS][: len(low)]])


def alone_outputs(model: Any, feeding: Feeding, rows: Sequence[Row]) -> list[torch.Tensor]:
    """The outputs of each sequence in a separate batch, without a mask or positions."""
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
    output = token_outputs(model(**on_device(batch, weights.device, weights.dtype)))
    if not isinstance(output, torch.Tensor) or output.ndim != 3 or output.shape[:2] != batch["input_ids"].shape:
        raise InputError(
            f"{type(model).__name__}: its output is not one vector per token; give an encoder or a causal model"
        )
    return output.float().cpu()


def token_outputs(output: Any) -> Any:
    """What a model gives for tokens; what is first in its output may be something else (Mixtral's router loss)."""
    named = (getattr(output, name, None) for name in ("logits", "last_hidden_state"))
    return next((value for value in named if value is not None), output[0])


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


def largest_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Over all outputs of all sequences; NaN where either has one."""
    return float(torch.stack([(one - other).abs().max() for one, other in zip(actual, expected, strict=True)]).max())


def moved_neighbours(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], rows: Sequence[Row]) -> float:
    """The largest change of a sequence that is not the first of its pack, which was changed."""
    others = [number > 0 for row in rows for number in range(len(row["seq_lens"]))]
    unchanged = ([each for each, other in zip(outputs, others, strict=True) if other] for outputs in (before, after))
    return largest_difference(*unchanged)


def scale_of(outputs: Sequence[torch.Tensor]) -> float:
    """The largest output, at least 1."""
    return max(1.0, *(float(output.abs().max()) for output in outputs))
