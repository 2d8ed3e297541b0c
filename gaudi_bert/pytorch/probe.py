"""Does a model treat each packed sequence as if it stood alone? Tried on the model itself, for every way of feeding it.

Packs of random tokens go through the model, and each of their sequences alone; the outputs must agree. Then the tokens of
one sequence of each pack are changed, and the outputs of the others must stay the same. The first finds wrong positions and
windows, the second finds every leak, even where something else is wrong too.

The sequences are longer than the windows of local attention, where the model's positions allow it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from gaudi_bert.common.errors import InputError
from gaudi_bert.pytorch.collate import TARGETS, PackCollator, model_inputs
from gaudi_bert.pytorch.feeding import Feeding, allowed_BLL
from gaudi_bert.pytorch.rows import Row

ALONE_BOUND = 1e-5
"""Allowed difference between packed and alone, of the largest output or 1, whichever is larger."""
NEIGHBOUR_BOUND = 1e-6
"""The same for what a changed neighbour may change."""

LENGTH = 256
_SHARES = ((0.38, 0.31, 0.24), (0.55, 0.4), (0.97,))
_REFUSALS = (
    InputError,
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    ImportError,
    AssertionError,
)


def _additive(model: Any, rows: list[Row], **changes: Any) -> dict[str, Any]:
    """The batch of target transformers-5, with some inputs replaced."""
    return {**PackCollator("transformers-5", model.config)(rows), **changes}


def _positions_only(model: Any, rows: list[Row]) -> dict[str, Any]:
    return _additive(model, rows, attention_mask=None)


def _numbers(model: Any, rows: list[Row]) -> dict[str, Any]:
    batch = _additive(model, rows)
    return {**batch, "attention_mask": batch["sequence_ids"]}


def _bool_mask(model: Any, rows: list[Row]) -> dict[str, Any]:
    batch = _additive(model, rows)
    allowed = allowed_BLL(batch["sequence_ids"], Feeding.of_config(model.config).causal)
    return {**batch, "attention_mask": allowed.unsqueeze(1)}


def _positions_from_0(model: Any, rows: list[Row]) -> dict[str, Any]:
    batch = _additive(model, rows)
    return {**batch, "position_ids": batch["position_ids"] - Feeding.of_config(model.config).position_offset}


def _target(name: str) -> Callable[[Any, list[Row]], dict[str, Any]]:
    return lambda model, rows: PackCollator(name, model.config)(rows)


WAYS: dict[str, Callable[[Any, list[Row]], dict[str, Any]]] = {
    **{target: _target(target) for target in TARGETS if target != "optimum-habana"},
    "positions only": _positions_only,
    "2-D mask of sequence numbers": _numbers,
    "4-D bool mask": _bool_mask,
    "additive mask, positions from 0": _positions_from_0,
}
"""Ways of feeding packs, by name: the targets of `PackCollator`, and what is seen elsewhere."""


@dataclass(frozen=True)
class Finding:
    """What one way of feeding does.

    Attributes:
        way: its name.
        alone: largest difference between packed and alone; None where the model refused.
        neighbour: largest change by a changed neighbour; None where the model refused.
        scale: the largest output, at least 1.
        refusal: the model's error.
    """

    way: str
    alone: float | None = None
    neighbour: float | None = None
    scale: float = 1.0
    refusal: str = ""

    @property
    def is_right(self) -> bool:
        """Whether packed sequences are treated as if they stood alone."""
        if self.alone is None or self.neighbour is None:
            return False
        return self.alone <= ALONE_BOUND * self.scale and self.neighbour <= NEIGHBOUR_BOUND * self.scale

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.alone is None or self.neighbour is None:
            return f"refused: {self.refusal}"
        if self.is_right:
            return f"right: packed and alone differ by {self.alone:.1e}"
        if self.neighbour > NEIGHBOUR_BOUND * self.scale:
            return f"LEAKS: a changed neighbour changes outputs by {self.neighbour:.1e} (packed and alone: {self.alone:.1e})"
        return f"WRONG: packed and alone differ by {self.alone:.1e}; no neighbour is seen, so positions or windows are wrong"


def load_model(folder: str | Path, attention: str | None = None) -> Any:
    """The model in `folder`, in evaluation mode (no dropout); nothing is downloaded.

    Args:
        folder: as `save_pretrained` writes it.
        attention: sdpa, eager, flex_attention or another that `transformers` has; the model's own when None.

    Raises:
        InputError: there is no model of `transformers`, or it cannot be opened, or not with this attention.
    """
    config_path = Path(folder) / "config.json"
    if not config_path.is_file():
        raise InputError(f"{config_path}: missing, so this is not the folder of a transformers model; check the path")
    try:
        named = json.loads(config_path.read_text(encoding="utf-8")).get("architectures") or []
        kind = getattr(transformers, named[0], transformers.AutoModel) if named else transformers.AutoModel
        options = {} if attention is None else {"attn_implementation": attention}
        return kind.from_pretrained(folder, local_files_only=True, **options).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{folder}: transformers cannot open it: {reason}") from error


def check_ways(names: Iterable[str]) -> None:
    """Refuse ways of feeding that are not known.

    Raises:
        InputError: one is not.
    """
    for name in names:
        if name not in (*WAYS, *TARGETS):
            raise InputError(f"way of feeding {name!r}: known are {', '.join(dict.fromkeys((*TARGETS, *WAYS)))}")


def probe_model(model: Any, ways: Iterable[str] | None = None, seed: int = 12345) -> list[Finding]:
    """Try ways of feeding packs to a model.

    Args:
        model: an encoder or a causal model of `transformers`, with its weights and its attention as it will be used.
        ways: names of `WAYS`, or targets; all when None.
        seed: of the tokens.

    Raises:
        InputError: an unknown way, or a model whose output is not one vector per token.
    """
    names = list(WAYS) if ways is None else list(ways)
    check_ways(names)
    model = model.eval()
    rows, changed = _packs(model.config, seed)
    with torch.no_grad(), _uncompiled():
        alone = _alone(model, rows)
        return [_probe(model, name, rows, changed, alone) for name in names]


def _uncompiled() -> AbstractContextManager[Any]:
    """Without compilation, which flex attention does for every length; what is tried is the mask, not the kernel."""
    if hasattr(torch.compiler, "set_stance"):  # from 2.6 on
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _packs(config: Any, seed: int) -> tuple[list[Row], list[Row]]:
    """Packs of random tokens, and the same with all tokens of the first sequence of each changed."""
    feeding = Feeding.of_config(config)
    most = int(getattr(config, "max_position_embeddings", None) or LENGTH)
    length = min(LENGTH, most - feeding.position_offset)
    if length < 16:
        raise InputError(f"max_position_embeddings = {most}: at least 16 positions are needed to try packs")
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    changed: list[Row] = []
    low = min(5, config.vocab_size // 2)  # not one of the first, which are special
    for shares in _SHARES:
        lengths = np.array([int(share * length) for share in shares])
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        pads = length - len(numbers)
        ids = random.integers(low, config.vocab_size, len(numbers))
        row = {
            "input_ids": np.pad(ids, (0, pads)),
            "token_type_ids": np.pad(np.concatenate([np.arange(n) >= n // 2 for n in lengths]).astype(int), (0, pads)),
            "position_ids": np.concatenate([np.arange(n) for n in (*lengths, pads)]),
            "sequence_ids": np.pad(numbers, (0, pads)),
            "seq_lens": lengths,
        }
        other = low + (ids - low + 1) % (config.vocab_size - low)
        rows.append(row)
        changed.append({**row, "input_ids": np.pad(np.where(numbers == 1, other, ids), (0, pads))})
    return rows, changed


def _alone(model: Any, rows: list[Row]) -> list[torch.Tensor]:
    """The outputs of each sequence in a batch of its own, fed as everybody feeds a sequence."""
    feeding, outputs = Feeding.of_config(model.config), []
    for row in rows:
        for number in range(1, len(row["seq_lens"]) + 1):
            chosen = row["sequence_ids"] == number
            inputs = {"input_ids": row["input_ids"][chosen]}
            if feeding.token_types:
                inputs["token_type_ids"] = row["token_type_ids"][chosen]
            outputs.append(_outputs(model, {name: torch.tensor(values)[None] for name, values in inputs.items()})[0])
    return outputs


def _outputs(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The first output, one vector for each token."""
    output = model(**batch)[0]
    if output.ndim != 3 or output.shape[:2] != batch["input_ids"].shape:
        raise InputError(
            f"{type(model).__name__}: its output is not one vector per token; give an encoder or a causal model"
        )
    return output.float()


def _probe(model: Any, way: str, rows: list[Row], changed: list[Row], alone: list[torch.Tensor]) -> Finding:
    feed = WAYS["transformers-4" if way == "optimum-habana" else way]
    scale = max(1.0, *(float(output.abs().max()) for output in alone))
    try:
        before, after = (_sequences(_outputs(model, model_inputs(feed(model, each))), rows) for each in (rows, changed))
    except _REFUSALS as error:
        return Finding(way, refusal=" ".join(f"{type(error).__name__}: {error}".split())[:120])
    difference = max(float((one - other).abs().max()) for one, other in zip(before, alone, strict=True))
    is_first = [number == 0 for row in rows for number in range(len(row["seq_lens"]))]
    moved = [(one - two).abs().max() for one, two, first in zip(before, after, is_first, strict=True) if not first]
    return Finding(way, difference, float(max(moved)), scale)


def _sequences(outputs: torch.Tensor, rows: list[Row]) -> list[torch.Tensor]:
    """The outputs of each sequence, of packs [B, L, H] or of one flattened row [1, T, H]."""
    lengths = [row["seq_lens"].tolist() for row in rows]
    if outputs.shape[0] == 1:
        return list(outputs[0].split([length for row in lengths for length in row]))
    return [part for output, row in zip(outputs, lengths, strict=True) for part in output[: sum(row)].split(row)]
