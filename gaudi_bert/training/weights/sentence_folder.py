"""Folders of sentence-transformers: how vectors are pooled, and where texts are cut. No TensorFlow.

`modules.json` lists what the vectors go through (a Transformer, a Pooling, perhaps a Normalize), `1_Pooling/config.json`
says how they are pooled, `sentence_bert_config.json` the most tokens of a text.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gaudi_bert.common.errors import InputError, shortened
from gaudi_bert.common.files import read_json
from gaudi_bert.training.weights.model_files import SentenceSettings, read_modules

_MODES: dict[str, Literal["cls", "mean", "max"]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}
_MODE = "pooling_mode_"


@dataclass(frozen=True)
class SentenceFolder:
    """Attributes:
    pooling: how tokens become one vector.
    normalize: whether vectors are divided by their length.
    max_sequence_length: longer texts are cut; None where the folder does not say.
    lower_case: whether texts are lower-cased before the tokenizer sees them.
    """

    pooling: Literal["cls", "mean", "max"]
    normalize: bool
    max_sequence_length: int | None
    lower_case: bool


def read_sentence_folder(folder: Path) -> SentenceFolder | None:
    """The folder's own settings; None where it is not of sentence-transformers."""
    if not os.path.lexists(folder / "modules.json"):
        return None
    kinds = {module.type.rpartition(".")[2]: module.path for module in read_modules(folder / "modules.json")}
    other = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if other or "Pooling" not in kinds:
        what = f"has a module {other[0]}" if other else "has no Pooling"
        raise InputError(f"{folder}: {what}, which is not known here; choose with --pooling cls, mean or max")
    settings = SentenceSettings.read_if_present(folder / "sentence_bert_config.json") or SentenceSettings()
    return SentenceFolder(
        pooling=_mode(folder / kinds["Pooling"] / "config.json"),
        normalize="Normalize" in kinds,
        max_sequence_length=settings.max_seq_length,
        lower_case=settings.do_lower_case is True,
    )


def _mode(path: Path) -> Literal["cls", "mean", "max"]:
    content = read_json(path) if os.path.lexists(path) else {}
    settings: dict[str, Any] = content if isinstance(content, dict) else {}
    chosen = [name for name, value in settings.items() if name.startswith(_MODE) and value is True]
    if isinstance(settings.get("pooling_mode"), str):
        chosen = [f"{_MODE}{settings['pooling_mode']}_tokens"]
        chosen = ["pooling_mode_cls_token"] if settings["pooling_mode"] == "cls" else chosen
    if len(chosen) != 1 or chosen[0] not in _MODES:
        modes = shortened(", ".join(chosen)) or "nothing"
        raise InputError(f"{path}: pools by {modes}; only one of cls, mean and max can be done, choose with --pooling")
    return _MODES[chosen[0]]
