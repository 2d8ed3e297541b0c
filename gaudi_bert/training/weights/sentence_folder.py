"""What a folder of sentence-transformers says of itself: how its vectors are pooled, and where its texts are cut.

`modules.json` lists what the vectors go through (a Transformer, a Pooling, perhaps a Normalize), `1_Pooling/config.json`
says how they are pooled, `sentence_bert_config.json` the most tokens of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json

__all__ = ["SentenceFolder", "read_sentence_folder"]

MODES: dict[str, Literal["cls", "mean", "max"]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}
MODE = "pooling_mode_"


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
    """The folder's own settings; None where it is not of sentence-transformers.

    Raises:
        InputError: it does what cannot be done here, such as a dense layer after the pooling.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = read_json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise InputError(f"{folder / 'modules.json'}: is no list of modules; copy the folder again")
    kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    other = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if other or "Pooling" not in kinds:
        what = f"has a module {other[0]}" if other else "has no Pooling"
        raise InputError(f"{folder}: {what}, which is not known here; choose with --pooling cls, mean or max")
    settings = _settings(folder / "sentence_bert_config.json")
    most = settings.get("max_seq_length")
    return SentenceFolder(
        pooling=_mode(folder / kinds["Pooling"] / "config.json"),
        normalize="Normalize" in kinds,
        max_sequence_length=most if isinstance(most, int) else None,
        lower_case=settings.get("do_lower_case") is True,
    )


def _settings(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _mode(path: Path) -> Literal["cls", "mean", "max"]:
    settings = _settings(path)
    chosen = [name for name, value in settings.items() if name.startswith(MODE) and value is True]
    if isinstance(settings.get("pooling_mode"), str):
        chosen = [f"{MODE}{settings['pooling_mode']}_tokens"]
        chosen = ["pooling_mode_cls_token"] if settings["pooling_mode"] == "cls" else chosen
    if len(chosen) != 1 or chosen[0] not in MODES:
        found = ", ".join(chosen) or "nothing"
        raise InputError(f"{path}: pools by {found}; only one of cls, mean and max can be done, choose with --pooling")
    return MODES[chosen[0]]
