"""Pipeline files: their type, how they are read, and the page of all keys.

An unknown key or a wrong value is rejected with the path of the key, what is allowed and, for a misspelt key, the nearest
correct one. `--set packing.depth=4` changes one value after the file is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator

from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import read_text
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
    allowed_values,
    field_at,
    first_problem,
    matching,
    nearest_keys,
    plain_types,
)


class PipelineSettings(Settings):
    """A complete pipeline file."""

    name: Annotated[
        str,
        matching(
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
    def finetunes(self) -> bool:
        """Whether the pipeline has the stage `finetune`."""
        return self.finetune.data is not None

    @property
    def predicts(self) -> bool:
        """Whether the pipeline has the stage `predict`."""
        return self.predict.data is not None

    @property
    def pretrains(self) -> bool:
        """Whether the pipeline has the pretraining stages. It has none if it fine-tunes given weights."""
        return not self.finetunes or self.finetune.init_checkpoint is None

    @property
    def container_engine(self) -> EngineName:
        """The engine of the training image. `auto` means PyTorch on Gaudi cards, and TensorFlow otherwise."""
        if self.training.engine != "auto":
            return self.training.engine
        return "pytorch" if self.resources.cards else "tensorflow"

    @property
    def training_kind(self) -> Literal["job", "mpijob", "trainjob"]:
        """The kind of object that trains on a cluster."""
        if self.kubernetes.training != "auto":
            return self.kubernetes.training
        return "mpijob" if self.resources.workers > 1 and self.container_engine == "tensorflow" else "job"

    @property
    def trains_as_mpijob(self) -> bool:
        """Whether an MPIJob trains on a cluster, whose workers are started over ssh."""
        return self.training_kind == "mpijob"

    @property
    def trains_on_nodes(self) -> bool:
        """Whether the training pods start their own ranks, which then connect to each other."""
        return self.training_kind == "trainjob" or (self.training_kind == "job" and self.resources.workers > 1)

    @property
    def needs_service(self) -> bool:
        """Whether the training pods need a headless Service to find each other."""
        return self.pretrains and self.training_kind == "job" and self.trains_on_nodes

    @property
    def has_network_policy(self) -> bool:
        """Whether a NetworkPolicy closes the training pods to all others. Policies do not apply to pods on the node's
        network.
        """
        together = self.pretrains and (self.trains_as_mpijob or self.trains_on_nodes)
        return together and self.kubernetes.network_policy and not self.kubernetes.efa

    @model_validator(mode="after")
    def _task_is_whole(self) -> PipelineSettings:
        if self.finetunes and self.task.name is None:
            raise ValueError("finetune.data is set, but task.name is not; set task.name, for example to classification")
        if self.predicts and not self.finetunes:
            raise ValueError("predict.data needs a model that this pipeline fine-tunes; set finetune.data and task.name")
        return self

    @model_validator(mode="after")
    def _training_fits_the_cluster(self) -> PipelineSettings:
        kind = self.training_kind
        if self.trains_on_nodes and self.container_engine == "tensorflow":
            raise ValueError(f"kubernetes.training is `{kind}`, but TensorFlow's workers need an MPIJob; set it to auto")
        if self.trains_as_mpijob and self.container_engine == "pytorch" and self.images.train is None:
            raise ValueError(
                "kubernetes.training is `mpijob`, which needs an sshd that the PyTorch images do not have; set it to auto"
            )
        if self.kubernetes.efa and not (self.resources.cards and self.trains_as_mpijob):
            raise ValueError("kubernetes.efa needs an MPIJob of TensorFlow on Gaudi cards; set it to 0")
        return self


# --- reading

Section = TypeVar("Section", bound=Settings)


def load_pipeline(
    path: Path | str | None, overrides: Iterable[str] = (), options: Mapping[str, tuple[str, object]] | None = None
) -> PipelineSettings:
    """Read a pipeline file, then apply the options of a command and the `--set` overrides.

    Args:
        path: The file. If None, all settings have their defaults.
        overrides: Texts of the form `key.path=value`, whose values are read as YAML.
        options: The options of a command, by the key that they set: `{"task.name": ("--task", "regression")}`. An option
            whose value is None was not given.

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
    typed = {}
    for key, (option, value) in (options or {}).items():
        if value == "":
            raise InputError(f"{option}: must not be empty; pass a value, or leave the option out")
        if value is not None:
            typed[key] = f"{option} {value}"
            _set_key(mapping, key, value, typed[key])
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key:
            raise InputError(f"--set {shorten(override)}: must have the form key.path=value, for example packing.depth=4")
        typed[key] = f"--set {override}"
        _set_key(mapping, key, _value_of(key, text, typed[key]), typed[key])
    return section_from_mapping(PipelineSettings, mapping, source, typed)


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
        raise InputError(first_problem(error, section, values, source, typed or {})) from error


def section_from_options(section: type[Section], **options: Any) -> Section:
    """Make a section from the options of a command: `--max-predictions` sets max_predictions, and None keeps the default.

    Validating all sections would take 0.1 s, so commands that need a single section call this function.
    """
    values = {name: value for name, value in options.items() if value is not None}
    typed = {name: f"--{name.replace('_', '-')} {value}" for name, value in values.items()}
    return section_from_mapping(section, values, "the options", typed)


def _set_key(mapping: dict[str, Any], key: str, value: object, typed: str) -> None:
    """Set one key of nested mappings, in place.

    Raises:
        InputError: A part of the key is a single value, so there are no keys below it. The message begins with `typed`.
    """
    *parents, last = key.split(".")
    for parent in parents:
        if mapping.get(parent) is None:
            mapping[parent] = {}
        mapping = mapping[parent]
        if not isinstance(mapping, dict):
            raise InputError(f"{shorten(typed)}: `{shorten(parent)}` is a single value and has no keys below it")
    mapping[last] = value


def _value_of(key: str, text: str, typed: str) -> object:
    value = parse_yaml(text, shorten(typed))
    field = field_at(PipelineSettings, key.split("."))
    kinds = plain_types(field.annotation) if field is not None else set()
    # YAML reads a version such as 9.90 as a number or a date. If the key only accepts text, keep the text.
    is_number = isinstance(value, int | float | date) and not isinstance(value, bool)
    return text.strip() if is_number and str in kinds and not kinds & {int, float} else value


# --- the page of all keys: `gaudi-bert settings`, docs/settings.md


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of pipeline files, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **PipelineSettings.model_json_schema()}


def settings_page(only: str | None = None, *, markdown: bool = True) -> list[str]:
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
    keys = {name: dict(_keys(section, f"{name}." if name else "", markdown)) for name, section in sections.items()}
    lines = []
    if only is None:
        lines += ["# Every key of a pipeline file", ""] * markdown + [*_INTRODUCTION, ""]
    elif only in sections:
        keys = {only: keys[only]}
    else:
        own = {key: line for section in keys.values() for key, line in section.items() if f"{key}.".startswith(f"{only}.")}
        if not own:
            problem = f"pipeline files have no such section or key; {nearest_keys(only, PipelineSettings)}"
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


def _keys(defaults: Settings, prefix: str, markdown: bool) -> Iterator[tuple[str, str]]:
    """Yield each key of a section with its line on the page, without top-level sections, which have tables of their own."""
    for name, field in type(defaults).model_fields.items():
        default, key, meaning = getattr(defaults, name), f"{prefix}{name}", field.description or ""
        if isinstance(default, Settings):
            if prefix:
                yield from _keys(default, f"{key}.", markdown)
            continue
        shown = "" if default is None else yaml.safe_dump(default, default_flow_style=True).splitlines()[0]
        if markdown:
            escaped = meaning.replace("|", "\\|")
            yield key, f"| `{key}` | {allowed_values(field)} | {shown and f'`{shown}`'} | {escaped} |"
        else:
            limits = allowed_values(field).replace("`", "") + (shown and f"; default {shown}")
            yield key, f"{key}: {limits}" + (meaning and f"\n    {meaning}")


# --- reading YAML: PyYAML silently accepts a key that appears twice, so it is rejected here

_MOST_CHARACTERS = 1 << 18


class _Loader(yaml.SafeLoader):
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
    if len(text) > _MOST_CHARACTERS:
        raise InputError(f"{source}: has {len(text):,} characters, but settings may have at most {_MOST_CHARACTERS:,}")
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        reason = shorten(str(error.problem or error.context), 200)
        raise InputError(f"{source}: {where}not valid YAML: {reason}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML raises ValueError for impossible numbers and dates.
        reason = "nested too deeply" if isinstance(error, RecursionError) else shorten(str(error), 240)
        raise InputError(f"{source}: not a YAML file: {reason}") from error
