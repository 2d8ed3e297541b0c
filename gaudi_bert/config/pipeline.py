"""Pipeline files: their type, how they are read, and the page of all keys.

An unknown key or a wrong value is rejected with the path of the key, what is allowed and, for a misspelt key, the nearest
correct one. `--set packing.depth=4` changes one value after the file is read.
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
from gaudi_bert.config.options import EXCLUSIVE, REQUIRED, TypedValue, combination_error
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
    find_field,
    format_first_problem,
    require_pattern,
    suggest_keys,
    types_without_metadata,
)


class PipelineSettings(Settings):
    """A complete pipeline file."""

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
        """Whether the pipeline has the stage `finetune`."""
        return self.finetune.data is not None

    @property
    def has_prediction(self) -> bool:
        """Whether the pipeline has the stage `predict`."""
        return self.predict.data is not None

    @property
    def has_pretraining(self) -> bool:
        """Whether the pipeline has the pretraining stages. It has none if it fine-tunes given weights."""
        return not self.has_finetuning or self.finetune.init_checkpoint is None

    @property
    def training_image_engine(self) -> EngineName:
        """The engine of the training image. `auto` means PyTorch on Gaudi cards, and TensorFlow otherwise."""
        if self.training.engine != "auto":
            return self.training.engine
        return "pytorch" if self.resources.cards else "tensorflow"

    @property
    def training_object_kind(self) -> Literal["job", "mpijob", "trainjob"]:
        """The kind of object that trains on a cluster."""
        if self.kubernetes.training != "auto":
            return self.kubernetes.training
        return "mpijob" if self.resources.workers > 1 and self.training_image_engine == "tensorflow" else "job"

    @property
    def trains_with_mpijob(self) -> bool:
        """Whether an MPIJob trains on a cluster, whose workers are started over ssh."""
        return self.training_object_kind == "mpijob"

    @property
    def training_pods_start_ranks(self) -> bool:
        """Whether the training pods start their own ranks, which then connect to each other."""
        return self.training_object_kind == "trainjob" or (self.training_object_kind == "job" and self.resources.workers > 1)

    @property
    def needs_headless_service(self) -> bool:
        """Whether the training pods need a headless Service to find each other."""
        return self.has_pretraining and self.training_object_kind == "job" and self.training_pods_start_ranks

    @property
    def has_network_policy(self) -> bool:
        """Whether a NetworkPolicy closes the training pods to all others. Policies do not apply to pods on the node's
        network.
        """
        together = self.has_pretraining and (self.trains_with_mpijob or self.training_pods_start_ranks)
        return together and self.kubernetes.network_policy and not self.kubernetes.efa

    @model_validator(mode="after")
    def _check_combinations_of_keys(self) -> PipelineSettings:
        keys = {key for pair in (*EXCLUSIVE, *REQUIRED) for key in pair if "." in key}
        message = combination_error({key: functools.reduce(getattr, key.split("."), self) for key in keys})
        if message is not None:
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_training_on_cluster(self) -> PipelineSettings:
        kind = self.training_object_kind
        if self.training_pods_start_ranks and self.training_image_engine == "tensorflow":
            raise ValueError(f"kubernetes.training is `{kind}`, but TensorFlow's workers need an MPIJob; set it to auto")
        if self.trains_with_mpijob and self.training_image_engine == "pytorch" and self.images.train is None:
            raise ValueError(
                "kubernetes.training is `mpijob`, which needs an sshd that the PyTorch images do not have; set it to auto"
            )
        if self.kubernetes.efa and not (self.resources.cards and self.trains_with_mpijob):
            raise ValueError("kubernetes.efa needs an MPIJob of TensorFlow on Gaudi cards; set it to 0")
        return self


# --- reading

Section = TypeVar("Section", bound=Settings)


def load_pipeline(
    path: Path | str | None, overrides: Iterable[str] = (), options: Mapping[str, TypedValue] | None = None
) -> PipelineSettings:
    """Read a pipeline file, then apply the options of a command and the `--set` overrides.

    Args:
        path: The file. If None, all settings have their defaults.
        overrides: Texts of the form `key.path=value`, whose values are read as YAML.
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
    """Parse the value of `--set`, such as "packing.depth=4", and return the key and the value that was typed.

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
    kinds = types_without_metadata(field.annotation) if field is not None else set()
    # YAML reads a version such as 9.90 as a number or a date. If the key only accepts text, keep the text.
    is_number = isinstance(value, int | float | date) and not isinstance(value, bool)
    return key, TypedValue(typed, text.strip() if is_number and str in kinds and not kinds & {int, float} else value)


def section_from_mapping(
    section: type[Section], values: Mapping[str, Any], source: str, typed: Mapping[str, str] | None = None
) -> Section:
    """Validate one section by itself. Missing keys get their defaults.

    Args:
        section: The class of the section.
        values: The values by key.
        source: What the values come from, for messages.
        typed: For keys that the user typed on the command line, the option with its value, for messages.

    Raises:
        InputError: A key or value is wrong.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise InputError(format_first_problem(error, section, values, source, typed or {})) from error


def section_from_options(section: type[Section], options: Mapping[str, TypedValue], **values: Any) -> Section:
    """Make one section from the options of a command. Validating all sections of a pipeline would take 0.1 s.

    Args:
        section: The class of the section.
        options: The options that the user typed, by the key that they set.
        **values: Values of keys that have no option.

    Raises:
        InputError: A key or value is wrong.
    """
    return _section_from_typed_values(section, values, "the options", options.items())


def _section_from_typed_values(
    section: type[Section], mapping: dict[str, Any], source: str, typed_values: Iterable[tuple[str, TypedValue]]
) -> Section:
    """Set keys of a mapping, in place, to what the user typed, and validate the mapping as a section.

    Raises:
        InputError: A key or value is wrong.
    """
    typed = {}
    for key, (text, value) in typed_values:
        typed[key] = text
        *parents, last = key.split(".")
        keys = mapping
        for parent in parents:
            if keys.get(parent) is None:
                keys[parent] = {}
            keys = keys[parent]
            if not isinstance(keys, dict):
                raise InputError(f"{shorten(text)}: `{shorten(parent)}` is a single value and has no keys below it")
        keys[last] = value
    return section_from_mapping(section, mapping, source, typed)


# --- the page of all keys: `gaudi-bert settings`, docs/settings.md


def pipeline_json_schema() -> dict[str, Any]:
    """Return the JSON schema of pipeline files, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **PipelineSettings.model_json_schema()}


def format_settings_page(only: str | None = None, *, markdown: bool = True) -> list[str]:
    """Write the page of all keys.

    Args:
        only: A section or key. By default, the page contains all of them.
        markdown: Write Markdown tables; otherwise, write plain text for a terminal.

    Returns:
        The lines of the page.

    Raises:
        InputError: There is no section or key `only`.
    """
    defaults = PipelineSettings()
    sections = {"": defaults, **{name: section for name, section in defaults if isinstance(section, Settings)}}
    keys = {name: dict(_describe_keys(section, f"{name}." if name else "", markdown)) for name, section in sections.items()}
    lines = []
    if only is None:
        lines += ["# Every key of a pipeline file", ""] * markdown + [*_INTRODUCTION, ""]
    elif only in sections:
        keys = {only: keys[only]}
    else:
        own = {key: line for section in keys.values() for key, line in section.items() if f"{key}.".startswith(f"{only}.")}
        if not own:
            problem = f"pipeline files have no such section or key; {suggest_keys(only, PipelineSettings)}"
            raise InputError(f"{shorten(only)}: {problem}")
        keys = {"": own}
    for name, section in keys.items():
        if name:
            title = (type(sections[name]).__doc__ or "").splitlines()[0]
            lines += [*([""] if lines else []), *([f"## {name}", "", title, ""] if markdown else [f"{name}: {title}", ""])]
        lines += _TABLE * markdown + list(section.values())
    return lines


_TABLE = ["| key | value | default | meaning |", "|---|---|---|---|"]
_INTRODUCTION = (
    "All keys are optional. To change a key on the command line, use for example `--set packing.depth=4`. A wrong key or",
    "value is rejected, and the message suggests the nearest correct key. `gaudi-bert settings` prints this page.",
)


def _describe_keys(defaults: Settings, prefix: str, markdown: bool) -> Iterator[tuple[str, str]]:
    """Yield each key of a section with its line on the page, without top-level sections, which have tables of their own."""
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


# --- reading YAML: PyYAML silently accepts a key that appears twice, so it is rejected here

_MAX_CHARACTERS = 1 << 18


class _UniqueKeyLoader(yaml.SafeLoader):
    """A `yaml.SafeLoader` that rejects repeated keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Build a mapping as PyYAML does, but raise an error if a key appears twice."""
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
    """Parse a YAML text with the types of JSON and dates.

    Raises:
        InputError: The text is too long, is not valid YAML, or repeats a key. The message begins with `source`.
    """
    if len(text) > _MAX_CHARACTERS:
        raise InputError(f"{source}: has {len(text):,} characters, but settings may have at most {_MAX_CHARACTERS:,}")
    try:
        return _UniqueKeyLoader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        reason = shorten(str(error.problem or error.context), 200)
        raise InputError(f"{source}: {where}not valid YAML: {reason}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML raises ValueError for impossible numbers and dates.
        reason = "nested too deeply" if isinstance(error, RecursionError) else shorten(str(error), 240)
        raise InputError(f"{source}: not a YAML file: {reason}") from error
