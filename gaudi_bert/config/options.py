"""Values of command-line options, and the options and settings that cannot be combined.

`EXCLUSIVE` and `REQUIRED` contain options of commands (`--shard`) as well as keys of pipeline files (`kubernetes.store`).
Commands call `check_option_combination` with what the user passed. `PipelineSettings` looks up the keys by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gaudi_bert.common.errors import InputError


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
