"""A `transformers` model from its folder, as the class that its config names, with the attention that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from gaudi_bert.common.errors import InputError

__all__ = ["load_model"]


def load_model(folder: str | Path, attention: str | None = None) -> Any:
    """The model in `folder`, ready to be asked (no dropout); nothing is downloaded.

    Args:
        folder: as `save_pretrained` writes it.
        attention: sdpa, eager, flex_attention or another that `transformers` has; the model's own when None.

    Raises:
        InputError: there is no model of `transformers`, or it cannot be opened, or not with this attention.
    """
    config_path = Path(folder) / "config.json"
    if not config_path.is_file():
        raise InputError(f"{config_path}: missing, so this is no folder of a transformers model; check the path")
    try:
        named = json.loads(config_path.read_text(encoding="utf-8")).get("architectures") or []
        kind = getattr(transformers, named[0], transformers.AutoModel) if named else transformers.AutoModel
        options = {} if attention is None else {"attn_implementation": attention}
        return kind.from_pretrained(folder, local_files_only=True, **options).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{folder}: transformers cannot open it: {reason}") from error
