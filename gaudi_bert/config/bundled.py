"""Pipeline files and model sizes that are bundled with the package, which users choose by name.

The folder `pipelines/` contains complete pipelines such as `demo`. The files `new-*.yaml` are templates, from which
`gaudi-bert init` writes a pipeline file. `MODELS` contains the model sizes that `train --model` accepts by name.
"""

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
PIPELINES_FOLDER = _FOLDER / "pipelines"


def find_pipeline_file(path: Path) -> Path:
    """Return the file of a bundled pipeline if `path` is the name of one, such as `demo`. Otherwise, return `path`. If a
    file exists at `path`, it takes precedence over a bundled pipeline.
    """
    bundled = PIPELINES_FOLDER / f"{path}.yaml"
    return bundled if path.name == str(path) and not path.exists() and bundled.is_file() else path


def fill_pipeline_file_template(pipeline_name: str) -> str:
    """Return the content of a new pipeline file, which contains the keys that most users change.

    Args:
        pipeline_name: The name of the pipeline. For the name `retrieval`, the keys are those of an embedding model.
    """
    template = "new-retrieval.yaml" if pipeline_name == "retrieval" else "new-pipeline.yaml"
    return read_text(_FOLDER / template).replace("NAME", pipeline_name)


# --- models: the sizes that `train --model` chooses

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# The model sizes that users choose by name. `tiny` is the default. `bert-base` and `bert-large` have the published sizes
# (Devlin et al., 2019, section 3).
MODELS = {
    "tiny": dict(zip(_SIZES, (128, 2, 2, 512), strict=True)),
    "bert-base": dict(zip(_SIZES, (768, 12, 12, 3072), strict=True)),
    "bert-large": dict(zip(_SIZES, (1024, 24, 16, 4096), strict=True)),
}


def get_model_size_overrides(model: str) -> list[str]:
    """Convert the value of `train --model` to `--set` overrides for the model sizes.

    Args:
        model: A name in `MODELS`, or the path of a config.json. All keys of the file that are settings are returned.

    Raises:
        InputError: The name is unknown, is the folder of a model, or the config.json is not of a BERT.
    """
    if model in MODELS:
        return [f"model.{key}={value}" for key, value in MODELS[model].items()]
    names = ", ".join(MODELS)
    if Path(model).is_dir():
        raise InputError(
            f"--model {shorten(model)}: a model folder can only be trained on a packed table, but --data is not a packed "
            f"table; create one with `gaudi-bert tokenize` and `gaudi-bert pack`, or pass one of {names} for records"
        )
    if not model.endswith(".json"):
        near = difflib.get_close_matches(model, MODELS, n=1, cutoff=0.4)
        remedy = (
            f"did you mean {near[0]}?"
            if near
            else f"pass one of {names} or a config.json; other models can only be trained on a packed table"
        )
        raise InputError(f"--model {shorten(model)}: {remedy}")
    from gaudi_bert.config.sections import ModelSettings

    content = read_json(Path(model))
    kind = content.get("model_type", "bert") if isinstance(content, dict) else None
    if kind != "bert":
        raise InputError(
            f"{model}: the model type is {kind}, but only BERT models can be trained on records; pass a packed table to "
            "--data"
        )
    known = {key: content[key] for key in ModelSettings.model_fields if content.get(key) is not None}
    return [f"model.{key}={json.dumps(value)}" for key, value in known.items()]


def is_bert(model: str) -> bool:
    """Return whether a value of `--model` is the name of a BERT model, or the path of a BERT model's config.json."""
    if not model.endswith(".json"):
        return model in (*MODELS, "bert")
    content = read_json(Path(model))
    return isinstance(content, dict) and content.get("model_type", "bert") == "bert"


def find_preset_name(settings: ModelSettings) -> str | None:
    """Return the name of the preset in `MODELS` that has the model sizes of the settings. Return None if there is none."""
    sizes = {key: getattr(settings, key) for key in _SIZES}
    return next((name for name, known in MODELS.items() if known == sizes), None)
