"""Does a model treat each packed sequence as if it stood alone? Tried on the model itself, for every way of feeding it.

Packs of random tokens go through the model, and each of their sequences alone; the outputs must agree. Then the tokens of
one sequence of each pack are changed, and the outputs of the others must stay the same. The first finds wrong positions and
windows, the second finds every leak, even where something else is wrong too.

The sequences are longer than the windows of local attention: a longer window is set to `WINDOW` while the model is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import check_model
from gaudi_bert.common.progress import Reporter
from gaudi_bert.pytorch.asking import feeding_of, try_model
from gaudi_bert.pytorch.collate import TARGETS, PackCollator, model_inputs
from gaudi_bert.pytorch.encoder_weights import architecture_of, read_model
from gaudi_bert.pytorch.feeding import Feeding, allowed_BLL
from gaudi_bert.pytorch.rows import Row
from gaudi_bert.pytorch.trial import (
    ALONE_BOUND,
    MODEL_ERRORS,
    NEIGHBOUR_BOUND,
    alone_outputs,
    largest_difference,
    moved_neighbours,
    outputs_of,
    random_packs,
    reason_of,
    scale_of,
    sequences_of,
    tokens_of_packs,
    trial_conditions,
    window_settings,
)

LENGTH, WINDOW = 256, 64

Batch = dict[str, Any]
Feed = Callable[[Feeding, list[Row]], Batch]


def _target(name: str, changes: Callable[[Feeding, Batch], Batch] = lambda _, __: {}) -> Feed:
    """The batch of a target, with some inputs replaced."""

    def feed(feeding: Feeding, rows: list[Row]) -> Batch:
        batch = PackCollator(name, feeding)(rows)
        return {**batch, **changes(feeding, batch)}

    return feed


def _mask(make: Callable[[Feeding, Any], Any]) -> Feed:
    """The batch of target transformers-5 with a mask computed from the numbers of the sequences."""
    return _target("transformers-5", lambda feeding, batch: {"attention_mask": make(feeding, batch["sequence_ids"])})


def _from_0(feeding: Feeding, batch: Batch) -> Batch:
    return {"position_ids": batch["position_ids"] - feeding.position_offset} if feeding.positions else {}


WAYS: dict[str, Feed] = {
    **{target: _target(target) for target in TARGETS if target != "optimum-habana"},
    "positions only": _mask(lambda _, __: None),
    "2-D mask of sequence numbers": _mask(lambda _, sequence_ids_BL: sequence_ids_BL),
    "4-D bool mask": _mask(lambda feeding, sequence_ids_BL: allowed_BLL(sequence_ids_BL, feeding.causal).unsqueeze(1)),
    "additive mask, positions from 0": _target("transformers-5", _from_0),
}
"""Ways of feeding packs, by name: the targets of `PackCollator`, and those of other software."""


@dataclass(frozen=True)
class Finding:
    """What a way of feeding packs to a model does; `alone` and `neighbour` are None where the model refused it.

    `alone` is the largest difference between packed and alone, `neighbour` the largest change by a changed neighbour, and
    `scale` the largest output, at least 1.
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

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "way": self.way,
            "right": self.is_right,
            "alone": self.alone,
            "neighbour": self.neighbour,
            "refusal": self.refusal,
        }


@dataclass(frozen=True)
class VerifyHuggingFaceResult:
    """Which ways of feeding packs to a `transformers` model are right."""

    model: str
    model_type: str
    attention: str
    right: tuple[str, ...]
    findings: tuple[Finding, ...]


def load_model(folder: str | Path, attention: str | None = None) -> Any:
    """The model in `folder`, in evaluation mode (no dropout); nothing is downloaded.

    `folder` is as `save_pretrained` writes it; `attention` (sdpa, eager, flex_attention, ...) is the model's own when None.
    """
    check_model(Path(folder))
    config_path = Path(folder) / "config.json"
    if not config_path.is_file():
        raise InputError(f"{config_path}: missing, so this is not the folder of a transformers model; check the path")
    kind = getattr(transformers, architecture_of(Path(folder)), transformers.AutoModel)
    return read_model(Path(folder), kind, **({} if attention is None else {"attn_implementation": attention}))


def _check_ways(names: Iterable[str]) -> None:
    """Refuse ways of feeding that are not known."""
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
        InputError: an unknown way, a model whose output is not one vector per token, or one that no packs can be fed to.
    """
    names = list(WAYS) if ways is None else list(ways)
    _check_ways(names)
    model = model.eval()
    with trial_conditions(), _short_windows(model):
        feeding = feeding_of(model)
        length = tokens_of_packs(model.config, feeding.position_offset, LENGTH)
        rows, changed = random_packs(model.config, length, seed, feeding.longest_sequence)
        alone = alone_outputs(model, feeding, rows)
        findings = [_probe(model, feeding, name, rows, changed, alone) for name in names]
        feed = next((WAYS[each.way] for each in findings if each.is_right), None)
        try:
            if feed is not None:  # what longer rows and training change does not depend on the way
                try_model(model, feeding, lambda rows: model_inputs(feed(feeding, rows)), training=True)
        except InputError as error:
            return [Finding(each.way, refusal=str(error)) if each.is_right else each for each in findings]
        return findings


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """While this lasts, no layer of the model sees farther than `WINDOW` tokens, if it has a window at all."""
    settings = window_settings(model.config)
    settings += [
        (module, "sliding_window", module.sliding_window)
        for module in model.modules()
        if type(getattr(module, "sliding_window", None)) is int
    ]
    shortened = [(owner, name, value) for owner, name, value in settings if type(value) is int and value > 2 * WINDOW]
    for owner, name, _ in shortened:
        setattr(owner, name, WINDOW)
    try:
        yield
    finally:
        for owner, name, value in shortened:
            setattr(owner, name, value)


def _probe(
    model: Any, feeding: Feeding, way: str, rows: list[Row], changed: list[Row], alone: list[torch.Tensor]
) -> Finding:
    feed = WAYS["transformers-4" if way == "optimum-habana" else way]
    try:
        before, after = (
            sequences_of(outputs_of(model, model_inputs(feed(feeding, each))), rows) for each in (rows, changed)
        )
    except MODEL_ERRORS as error:
        return Finding(way, refusal=reason_of(error))
    moved = moved_neighbours(before, after, rows)
    return Finding(way, largest_difference(before, alone), moved, scale_of(alone))


def verify_huggingface(
    folder: Path, *, target: str | None, attention: str | None, reporter: Reporter
) -> VerifyHuggingFaceResult:
    """The stage verify-model for a `transformers` model: probe it with its own weights.

    `target` is the way of feeding to test, None for all; `attention` is one of `transformers`' (sdpa, eager,
    flex_attention), the model's own when None.
    """
    _check_ways([target] if target is not None else [])
    model = load_model(folder, attention)
    used = model.config._attn_implementation  # noqa: SLF001 - in no public attribute
    findings = probe_model(model, [target] if target is not None else None)
    for finding in findings:
        reporter.say(f"verify-model:   {finding.way}: {finding.verdict}")
    right = [finding.way for finding in findings if finding.is_right]
    if not right:
        reason = f"{findings[0].way}: {findings[0].verdict}" if target is not None else "no way of feeding it packs is right"
        remedy = f"gaudi-bert verify-model --huggingface {folder} tries the others" if target is not None else "feed it rows"
        raise FailedError(f"{folder} ({model.config.model_type}, {used}): {reason}; {remedy}")
    return VerifyHuggingFaceResult(
        model=str(folder),
        model_type=model.config.model_type,
        attention=str(used),
        right=tuple(right),
        findings=tuple(findings),
    )
