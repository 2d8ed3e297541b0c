"""Pipeline files: the settings that they contain, how they are read, and the reference page of all keys.

If a key is unknown or a value is wrong, the message names the key and the allowed values, and suggests the most similar key.
`--set packing.depth=4` changes one value after the file has been read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator

from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import read_text
from gaudi_bert.config.options import EXCLUSIVE, REQUIRED, TypedValue, option_combination_error
from gaudi_bert.config.places import DockerSettings, ImageSettings, KubernetesSettings, ResourceSettings, StoreSettings
from gaudi_bert.config.sections import (
    FineTuneSettings,
    MlperfSettings,
    ModelSettings,
    PackingSettings,
    PredictSettings,
    PrepareSettings,
    TaskSettings,
    TrainingSettings,
)
from gaudi_bert.config.values import (
    EngineName,
    Settings,
    describe_allowed_values,
    extract_types,
    find_field,
    format_first_problem,
    require_pattern,
    suggest_keys,
)


class PipelineSettings(Settings):
    """The contents of a pipeline file: all settings of a pipeline, in sections."""

    name: Annotated[
        str,
        require_pattern(
            r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?",
            "at most 42 characters of a to z, 0 to 9 and -, beginning with a letter and not ending with -",
        ),
    ] = Field("demo", description="name of the pipeline and of its work folder")
    prepare: PrepareSettings = Field(default_factory=PrepareSettings)
    packing: PackingSettings = Field(default_factory=PackingSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    task: TaskSettings = Field(default_factory=TaskSettings)
    finetune: FineTuneSettings = Field(default_factory=FineTuneSettings)
    predict: PredictSettings = Field(default_factory=PredictSettings)
    mlperf: MlperfSettings = Field(default_factory=MlperfSettings)
    images: ImageSettings = Field(default_factory=ImageSettings)
    resources: ResourceSettings = Field(default_factory=ResourceSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    docker: DockerSettings = Field(default_factory=DockerSettings)
    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)

    @property
    def has_finetuning(self) -> bool:
        """Whether the pipeline fine-tunes a model, which is the case if `finetune.data` is set."""
        return self.finetune.data is not None

    @property
    def has_prediction(self) -> bool:
        """Whether the pipeline makes predictions, which is the case if `predict.data` is set."""
        return self.predict.data is not None

    @property
    def has_pretraining(self) -> bool:
        """Whether the pipeline pretrains a model. It does, unless it fine-tunes the existing model in
        `finetune.init_checkpoint`.
        """
        return not self.has_finetuning or self.finetune.init_checkpoint is None

    @property
    def training_image_engine(self) -> EngineName:
        """The engine in the training image. If `training.engine` is `auto`, it is PyTorch with Gaudi cards, and TensorFlow
        without cards.
        """
        if self.training.engine != "auto":
            return self.training.engine
        return "pytorch" if self.resources.cards else "tensorflow"

    @property
    def training_object_kind(self) -> Literal["job", "mpijob", "trainjob"]:
        """The kind of Kubernetes object that trains the model."""
        if self.kubernetes.training != "auto":
            return self.kubernetes.training
        return "mpijob" if self.resources.workers > 1 and self.training_image_engine == "tensorflow" else "job"

    @property
    def trains_with_mpijob(self) -> bool:
        """Whether an MPIJob trains the model on a cluster. Its launcher starts the training processes over ssh."""
        return self.training_object_kind == "mpijob"

    @property
    def training_pods_start_own_processes(self) -> bool:
        """Whether each training pod starts its own processes, which then connect to the processes of the other pods."""
        return self.training_object_kind == "trainjob" or (self.training_object_kind == "job" and self.resources.workers > 1)

    @property
    def needs_headless_service(self) -> bool:
        """Whether the training pods need a headless Service to find each other."""
        return self.has_pretraining and self.training_object_kind == "job" and self.training_pods_start_own_processes

    @property
    def has_network_policy(self) -> bool:
        """Whether the training pods get a NetworkPolicy that lets only other training pods connect to them.

        A policy has no effect on pods that use the network of the node (`kubernetes.efa`), so these have none.
        """
        together = self.has_pretraining and (self.trains_with_mpijob or self.training_pods_start_own_processes)
        return together and self.kubernetes.network_policy and not self.kubernetes.efa

    @model_validator(mode="after")
    def _check_combinations_of_keys(self) -> PipelineSettings:
        keys = {key for pair in (*EXCLUSIVE, *REQUIRED) for key in pair if "." in key}
        message = option_combination_error({key: functools.reduce(getattr, key.split("."), self) for key in keys})
        if message is not None:
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_training_on_cluster(self) -> PipelineSettings:
        kind = self.training_object_kind
        if self.training_pods_start_own_processes and self.training_image_engine == "tensorflow":
            raise ValueError(
                f"kubernetes.training is `{kind}`, but several workers of TensorFlow require an MPIJob; set it to auto"
            )
        if self.trains_with_mpijob and self.training_image_engine == "pytorch" and self.images.train is None:
            raise ValueError(
                "kubernetes.training is `mpijob`, but the PyTorch images lack the sshd that it requires; set it to auto"
            )
        if self.kubernetes.efa and not (self.resources.cards and self.trains_with_mpijob):
            raise ValueError("kubernetes.efa requires an MPIJob of TensorFlow on Gaudi cards; set it to 0")
        return self


# --- settings from files, options and `--set`

Section = TypeVar("Section", bound=Settings)


def load_pipeline(
    path: Path | str | None, overrides: Iterable[str] = (), options: Mapping[str, TypedValue] | None = None
) -> PipelineSettings:
    """Read a pipeline file, and apply the command-line options and the `--set` overrides to its settings.

    Args:
        path: The file. If it is None, all settings begin with their defaults.
        overrides: The values of `--set`, such as "packing.depth=4".
        options: The options that the user typed, by the key that they set: `{"task.name": TypedValue(...)}`.

    Raises:
        InputError: The file cannot be read, or a key or value is wrong.
    """
    source = str(path) if path is not None else "the settings"
    mapping: Any = {}
    if path is not None:
        mapping = parse_yaml(read_text(path), str(path))
        mapping = {} if mapping is None else mapping
        if not isinstance(mapping, dict):
            raise InputError(f"{path}: a pipeline file must contain `key: value` pairs, not a {type(mapping).__name__}")
    return _section_from_typed_values(
        PipelineSettings, mapping, source, [*(options or {}).items(), *map(parse_override, overrides)]
    )


def parse_override(override: str) -> tuple[str, TypedValue]:
    """Parse a `--set` override such as "packing.depth=4". Return the key, and the value as the user typed it.

    Raises:
        InputError: The text does not have the form key.path=value, or the value is not valid YAML.
    """
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not key:
        raise InputError(f"--set {shorten(override)}: must have the form key.path=value, for example packing.depth=4")
    typed = f"--set {override}"
    value = parse_yaml(text, shorten(typed))
    field = find_field(PipelineSettings, key.split("."))
    kinds = extract_types(field.annotation) if field is not None else set()
    # YAML parses a version such as 9.90 as a number or a date. If the key accepts only text, keep the text that the user
    # typed.
    is_number = isinstance(value, int | float | date) and not isinstance(value, bool)
    return key, TypedValue(typed, text.strip() if is_number and str in kinds and not kinds & {int, float} else value)


def section_from_mapping(
    section_class: type[Section], values: Mapping[str, Any], source: str, typed_by_key: Mapping[str, str] | None = None
) -> Section:
    """Validate values, and return them as a section of settings. Keys that are missing get their defaults.

    Args:
        section_class: The class of the section.
        values: The values by key.
        source: The file or other place that the values come from. Messages begin with it.
        typed_by_key: For each key that the user typed on the command line, the option with its value. Messages about such a
            key begin with this text instead.

    Raises:
        InputError: A key or value is wrong.
    """
    try:
        return section_class.model_validate(values)
    except ValidationError as error:
        raise InputError(format_first_problem(error, section_class, values, source, typed_by_key or {})) from error


def section_from_options(section_class: type[Section], options: Mapping[str, TypedValue], **values: Any) -> Section:
    """Create a single section of settings from command-line options.

    Validating all sections of a pipeline would take 0.1 s.

    Args:
        section_class: The class of the section.
        options: The options that the user typed, by the key that they set.
        **values: Values of keys that have no option.

    Raises:
        InputError: A key or value is wrong.
    """
    return _section_from_typed_values(section_class, values, "the options", options.items())


def _section_from_typed_values(
    section_class: type[Section], mapping: dict[str, Any], source: str, typed_values: Iterable[tuple[str, TypedValue]]
) -> Section:
    """Add the values that the user typed to `mapping`, validate it, and return it as a section of settings.

    Args:
        section_class: The class of the section.
        mapping: The other values by key. It is changed in place.
        source: The file or other place that these values come from. Messages begin with it.
        typed_values: The full key and the value of each option or `--set`, in the order in which they apply.

    Raises:
        InputError: A key or value is wrong.
    """
    typed_by_key = {}
    for key, (text, value) in typed_values:
        typed_by_key[key] = text
        *parents, last = key.split(".")
        keys = mapping
        for parent in parents:
            if keys.get(parent) is None:
                keys[parent] = {}
            keys = keys[parent]
            if not isinstance(keys, dict):
                raise InputError(
                    f"{shorten(text)}: `{shorten(parent)}` is a single value and contains no keys; correct the key"
                )
        keys[last] = value
    return section_from_mapping(section_class, mapping, source, typed_by_key)


# --- the page that lists all keys, which `gaudi-bert settings` prints and docs/settings.md contains


def build_pipeline_json_schema() -> dict[str, Any]:
    """Return the JSON schema of pipeline files, which editors use to complete and check keys."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **PipelineSettings.model_json_schema()}


def format_settings_page(section_or_key: str | None = None, *, markdown: bool = True) -> list[str]:
    """Return the lines of the reference page for pipeline files, which lists keys with their allowed values, defaults and
    meaning.

    Args:
        section_or_key: The section or key to describe. By default, the page contains all of them.
        markdown: Whether the page contains Markdown tables. Otherwise, it is plain text for a terminal.

    Raises:
        InputError: There is no such section or key.
    """
    defaults = PipelineSettings()
    sections = {"": defaults, **{name: section for name, section in defaults if isinstance(section, Settings)}}
    keys = {name: dict(_describe_keys(section, f"{name}." if name else "", markdown)) for name, section in sections.items()}
    lines = []
    if section_or_key is None:
        lines += ["# Every key of a pipeline file", ""] * markdown + [*_INTRODUCTION, ""]
    elif section_or_key in sections:
        keys = {section_or_key: keys[section_or_key]}
    else:
        start, lines_by_key = f"{section_or_key}.", {key: line for section in keys.values() for key, line in section.items()}
        keys = {"": {key: line for key, line in lines_by_key.items() if f"{key}.".startswith(start)}}
        if not keys[""]:
            problem = f"pipeline files have no such section or key; {suggest_keys(section_or_key, PipelineSettings)}"
            raise InputError(f"{shorten(section_or_key)}: {problem}")
    for name, section in keys.items():
        if name:
            title = (type(sections[name]).__doc__ or "").splitlines()[0]
            lines += [*([""] if lines else []), *([f"## {name}", "", title, ""] if markdown else [f"{name}: {title}", ""])]
        lines += _TABLE * markdown + list(section.values())
    return lines


_TABLE = ["| key | value | default | meaning |", "|---|---|---|---|"]
_INTRODUCTION = (
    "All keys are optional. To change a key on the command line, use for example `--set packing.depth=4`. Unknown keys and",
    "wrong values are rejected, and the message suggests the most similar key. `gaudi-bert settings` prints this page.",
)


def _describe_keys(defaults: Settings, prefix: str, markdown: bool) -> Iterator[tuple[str, str]]:
    """Yield the full name and the line of the reference page for each key in a section of settings.

    Args:
        defaults: The section with its defaults. Its inner sections are included, but not those of the pipeline itself,
            because they have tables of their own.
        prefix: The text before each key, such as "packing.". It is empty for the pipeline itself.
        markdown: Whether the line is a row of a Markdown table. Otherwise, it is plain text.
    """
    for name, field in type(defaults).model_fields.items():
        default, key, meaning = getattr(defaults, name), f"{prefix}{name}", field.description or ""
        if isinstance(default, Settings):
            if prefix:
                yield from _describe_keys(default, f"{key}.", markdown)
            continue
        shown = "" if default is None else yaml.safe_dump(default, default_flow_style=True).splitlines()[0]
        if markdown:
            escaped = meaning.replace("|", "\\|")
            yield key, f"| `{key}` | {describe_allowed_values(field)} | {shown and f'`{shown}`'} | {escaped} |"
        else:
            limits = describe_allowed_values(field).replace("`", "") + (shown and f"; default {shown}")
            yield key, f"{key}: {limits}" + (meaning and f"\n    {meaning}")


# --- YAML. PyYAML silently accepts a key that appears twice, so such keys are rejected here.

_MAX_CHARACTERS = 1 << 18


class _UniqueKeyLoader(yaml.SafeLoader):
    """A `yaml.SafeLoader` that raises an error if a mapping contains a key twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Parse a mapping as PyYAML does, and raise an error if it contains a key twice."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    name = shorten(key.value)
                    raise yaml.YAMLError(
                        f"`{name}` appears twice, in lines {lines[key.value]} and {line}; remove one of them"
                    )
                lines[key.value] = line
        return node


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML text, and return the resulting Python value. Keys that appear twice are rejected.

    Args:
        text: The text.
        source: The file or option that the text comes from. Messages begin with it.

    Raises:
        InputError: The text is too long, is not valid YAML, or repeats a key.
    """
    if len(text) > _MAX_CHARACTERS:
        raise InputError(
            f"{source}: the settings have {len(text):,} characters, but at most {_MAX_CHARACTERS:,} are allowed; shorten "
            "them"
        )
    try:
        return _UniqueKeyLoader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        reason = shorten(str(error.problem or error.context), 200)
        raise InputError(f"{source}: {where}the settings are not valid YAML: {reason}; correct them") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML raises a plain ValueError, not a YAMLError, for numbers and dates that are impossible.
        reason = "nested too deeply" if isinstance(error, RecursionError) else shorten(str(error), 240)
        raise InputError(f"{source}: the settings are not valid YAML: {reason}; correct them") from error
