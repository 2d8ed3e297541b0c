"""What has a name instead of a path: the pipeline files that the package carries, those that `init` writes, and models."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import read_json, read_text

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from gaudi_bert.config.sections import ModelSettings

_FOLDER = Path(__file__).resolve().parent
SHIPPED = _FOLDER / "pipelines"


def find_pipeline_file(path: Path) -> Path:
    """`path`, or, where no such file exists and it is a bare name such as `demo`, that pipeline of the package."""
    shipped = SHIPPED / f"{path}.yaml"
    return shipped if path.name == str(path) and not path.exists() and shipped.is_file() else path


def new_pipeline_text(name: str) -> str:
    """The text of a pipeline file with the keys that most pipelines set; of `retrieval`, with those of embedding models."""
    template = "new-retrieval.yaml" if name == "retrieval" else "new-pipeline.yaml"
    return read_text(_FOLDER / template).replace("NAME", name)


# --- models: the sizes that `train --model` chooses

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
MODELS = {
    "tiny": dict(zip(_SIZES, (128, 2, 2, 512), strict=True)),
    "bert-base": dict(zip(_SIZES, (768, 12, 12, 3072), strict=True)),
    "bert-large": dict(zip(_SIZES, (1024, 24, 16, 4096), strict=True)),
}
"""The default; BERT's two, as published (Devlin et al., 2019, section 3)."""


def model_size_overrides(name: str) -> list[str]:
    """`--set` for the sizes of a model of `MODELS`, or of all settings that a config.json has."""
    if name in MODELS:
        return [f"model.{key}={value}" for key, value in MODELS[name].items()]
    if Path(name).is_dir():
        raise InputError(
            f"--model {shorten(name)}: a model's folder is trained on a packed table, and --data is not one; make it by "
            f"`gaudi-bert tokenize` and `gaudi-bert pack`, or choose {', '.join(MODELS)} for records"
        )
    if not name.endswith(".json"):
        near = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.4)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"choose {', '.join(MODELS)}, or give a config.json; other models need --data with a packed table"
        )
        raise InputError(f"--model {shorten(name)}: {hint}")
    from gaudi_bert.config.sections import ModelSettings

    content = read_json(Path(name))
    kind = content.get("model_type", "bert") if isinstance(content, dict) else None
    if kind != "bert":
        raise InputError(f"{name}: is not of a BERT; other types are trained on packed tables: give one with --data")
    known = {key: content[key] for key in ModelSettings.model_fields if content.get(key) is not None}
    return [f"model.{key}={json.dumps(value)}" for key, value in known.items()]


def is_bert_name(name: str) -> bool:
    """Whether `--model` names a BERT, or a config.json of one."""
    if not name.endswith(".json"):
        return name in (*MODELS, "bert")
    content = read_json(Path(name))
    return isinstance(content, dict) and content.get("model_type", "bert") == "bert"


def preset_name_for(settings: ModelSettings) -> str | None:
    """The name of a model of these sizes."""
    sizes = {key: getattr(settings, key) for key in _SIZES}
    return next((name for name, known in MODELS.items() if known == sizes), None)
