"""Values of command-line options: how they are passed on, which bundled files they name, and which cannot be combined.

The folder `pipelines/` contains complete pipelines such as `demo`. The files `new-*.yaml` are templates, from which
`gaudi-bert init` writes a pipeline file. `MODELS` contains the model sizes that `train --model` accepts by name.

`EXCLUSIVE` and `REQUIRED` contain options of commands (`--shard`) as well as keys of pipeline files (`kubernetes.store`).
Commands call `check_option_combination` with what the user passed. `PipelineSettings` looks up the keys by itself.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import read_json, read_text

if TYPE_CHECKING:  # settings take as long to load as everything else, and `--help` needs none
    from gaudi_bert.config.sections import ModelSettings


class TypedValue(NamedTuple):
    """A value that a user has set on the command line, with an option or with `--set`.

    Attributes:
        text: The option with its value, such as "--depth 4" or "--set packing.depth=4". Messages begin with it.
        value: The value.
    """

    text: str
    value: object


_ONE_OF_THEM = "pass only one of them"
_PODS_IN_SETTINGS = "set resources.data_workers and resources.data_processes instead"

# Each key is a pair of options or settings that cannot be combined. Each value tells the user what to do instead.
EXCLUSIVE: dict[tuple[str, str], str] = {
    ("--vocab", "--train-vocab"): _ONE_OF_THEM,
    ("--resume", "--overwrite"): _ONE_OF_THEM,
    ("--prompt", "--prompt-name"): _ONE_OF_THEM,
    ("--group-by", "--on-bad-row skip"): _ONE_OF_THEM,
    ("--group-by", "--out -"): "pass a file to --out, because a query is complete only after the last row",
    ("--shard", "--finish"): "run all parts first, then --finish once",
    ("--shard", "--verify"): "run all parts first, then --finish once, then `gaudi-bert verify`",
    ("--finish", "--overwrite"): "repeat the parts with --shard K/N --overwrite",
    ("--on kubernetes", "--overwrite"): "pods would remove each other's files, so run `gaudi-bert k8s delete PIPELINE "
    "--data` first, or change the name of the pipeline",
    ("--on kubernetes", "--shard"): _PODS_IN_SETTINGS,
    ("--on kubernetes", "--finish"): _PODS_IN_SETTINGS,
    ("--on kubernetes", "--workers"): _PODS_IN_SETTINGS,
    ("SECTION", "--json"): "leave SECTION out, because the JSON schema always contains all sections",
    ("kubernetes.store", "kubernetes.work_claim"): "set only one of them",
}

# Each key is a pair of options or settings, and the first of them requires the second. Each value tells the user how to set
# the second one.
REQUIRED: dict[tuple[str, str], str] = {
    ("kubernetes.store_secret", "kubernetes.store"): "set it, for example to s3://bucket/prefix",
    ("finetune.data", "task.name"): "set task.name, for example to classification",
    ("predict.data", "finetune.data"): "set finetune.data and task.name, so that the pipeline fine-tunes a model",
}


def option_combination_error(values: Mapping[str, object]) -> str | None:
    """Return an error message if the given options and settings cannot be combined, and otherwise None.

    Args:
        values: The value of each option or key. None and False mean that it was not passed.
    """
    passed = {name for name, value in values.items() if value is not None and value is not False}
    for (first, second), remedy in EXCLUSIVE.items():
        if {first, second} <= passed:
            return f"{first} cannot be combined with {second}; {remedy}"
    for (first, second), remedy in REQUIRED.items():
        if first in passed and second not in passed:
            return f"{first} requires {second}; {remedy}"
    return None


def check_option_combination(values: Mapping[str, object]) -> None:
    """Raise InputError if the given options cannot be combined.

    Args:
        values: The value of each option. None and False mean that it was not passed.

    Raises:
        InputError: Two of the options cannot be combined.
    """
    message = option_combination_error(values)
    if message is not None:
        raise InputError(message)


# --- bundled pipelines, which users choose by name

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
