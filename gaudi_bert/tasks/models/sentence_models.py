"""Folders of sentence-transformers (5 and 6): how the vectors of tokens become that of a text, for `SentenceTransformer`."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.common.files import write_json
from gaudi_bert.config.sections import TaskSettings
from gaudi_bert.tasks.models.task_models import is_bert
from gaudi_bert.training.model_files import MODES, SentenceFolder

_MODULES = "sentence_transformers.models"


def sees_only_before(model: Path) -> bool:
    """Whether a token of a model sees only those before it."""
    if is_bert(model):
        return False
    from gaudi_bert.model.heads import VectorHead
    from gaudi_bert.pytorch.asking import feeding_of
    from gaudi_bert.pytorch.encoder_weights import config_of, read_encoder_config

    folder = model if model.is_dir() else model.parent
    return feeding_of(config_of(read_encoder_config(folder / "config.json"), VectorHead("cls", normalize=False))).causal


def write_sentence_folder(
    folder: Path, settings: TaskSettings, start: SentenceFolder, max_sequence_length: int, hidden_size: int
) -> None:
    """Write modules.json, the pooling, perhaps the normalisation, the cut, and the prompts; modules.json comes last."""
    pooling = settings.pooling or "mean"
    modes = {name: mode == pooling for name, mode in MODES.items()}
    kinds = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if start.normalize else {})}
    for path in filter(None, kinds.values()):
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden_size, **modes})
    cut = {"max_seq_length": max_sequence_length, "do_lower_case": start.lower_case}
    write_json(folder / "sentence_bert_config.json", cut)
    prompts = {**start.prompts, "query": settings.query_prompt, "document": settings.document_prompt}
    stored = {
        "prompts": {name: prompt or "" for name, prompt in prompts.items()},
        "default_prompt_name": start.default_prompt_name,
        "similarity_fn_name": "cosine",
    }
    write_json(folder / "config_sentence_transformers.json", stored)
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_MODULES}.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
