"""An encoder from the folder of its model, as `save_pretrained` writes it; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import read_json
from gaudi_bert.pytorch.encoder import PackedEncoder
from gaudi_bert.pytorch.trial import one_line
from gaudi_bert.tasks.rows.tokenizer import RowTokenizer

_AUTO = {
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
}


def open_encoder(
    folder: Path, tokenizer: RowTokenizer, *, with_head: bool, precision: Literal["float32", "bfloat16"]
) -> PackedEncoder:
    """The encoder of a folder, on a GPU of CUDA where there is one.

    Args:
        folder: of the model.
        tokenizer: the one that lies there.
        with_head: keep a head for texts or tokens, if config.json names one.
        precision: of the weights, and of what is computed.

    Raises:
        InputError: `transformers` cannot open it, or it cannot be fed packs.
    """
    content = read_json(folder / "config.json")
    names = content.get("architectures") if isinstance(content, dict) else None
    name = str(names[0]) if isinstance(names, list) and names else ""
    auto: Any = transformers.AutoModel
    if with_head:
        auto = next((kind for ending, kind in _AUTO.items() if name.endswith(ending)), auto)
    try:
        model = auto.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        raise InputError(f"{folder}: transformers cannot open it: {one_line(error, 200)}") from error
    model.to("cuda" if torch.cuda.is_available() else "cpu", torch.float32 if precision == "float32" else torch.bfloat16)
    return PackedEncoder(model, tokenizer)
