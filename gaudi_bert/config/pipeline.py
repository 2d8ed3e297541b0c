"""A pipeline file: its type, how it is read and refused, and the page of all its keys.

An unknown key or a wrong value is refused with the path of the key, what is allowed and, for a misspelt key, the nearest
right one. `--set packing.depth=4` changes one value after the file is read.
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
        str, matching(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?", "at most 42 of a to z, 0 to 9 and -, a letter first, no - last")
    ] = Field("demo", description="also the work folder's name")
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
        """Whether it has the stage `finetune`."""
        return self.finetune.data is not None

    @property
    def predicts(self) -> bool:
        """Whether it has the stage `predict`."""
        return self.predict.data is not None

    @property
    def pretrains(self) -> bool:
        """Whether it has the stages of pretraining: always, unless it fine-tunes weights that somebody gives it."""
        return not self.finetunes or self.finetune.init_checkpoint is None

    @property
    def container_engine(self) -> EngineName:
        """The engine of the image that trains: as named, else TensorFlow, but on cards what the vendor has today."""
        if self.training.engine != "auto":
            return self.training.engine
        return "pytorch" if self.resources.cards else "tensorflow"

    @property
    def training_kind(self) -> Literal["job", "mpijob", "trainjob"]:
        """Return what training is on a cluster."""
        if self.kubernetes.training != "auto":
            return self.kubernetes.training
        return "mpijob" if self.resources.workers > 1 and self.container_engine == "tensorflow" else "job"

    @property
    def trains_as_mpijob(self) -> bool:
        """Whether training on a cluster takes an MPIJob, whose workers are started by ssh."""
        return self.training_kind == "mpijob"

    @property
    def trains_on_nodes(self) -> bool:
        """Whether the pods that train on a cluster start their ranks by themselves, and meet."""
        return self.training_kind == "trainjob" or (self.training_kind == "job" and self.resources.workers > 1)

    @property
    def needs_service(self) -> bool:
        """Whether a Service of our own names the pods that meet."""
        return self.pretrains and self.training_kind == "job" and self.trains_on_nodes

    @property
    def has_network_policy(self) -> bool:
        """Whether pods that train together are closed to all others; policies know no pods on the node's own network."""
        together = self.pretrains and (self.trains_as_mpijob or self.trains_on_nodes)
        return together and self.kubernetes.network_policy and not self.kubernetes.efa

    @model_validator(mode="after")
    def _task_is_whole(self) -> PipelineSettings:
        if self.finetunes and self.task.name is None:
            raise ValueError("finetune.data is set, but no task; set task.name, for example to classification")
        if self.predicts and not self.finetunes:
            raise ValueError("predict.data needs a model that this pipeline fine-tunes; set finetune.data and task.name")
        return self

    @model_validator(mode="after")
    def _training_fits_the_cluster(self) -> PipelineSettings:
        kind = self.training_kind
        if self.trains_on_nodes and self.container_engine == "tensorflow":
            raise ValueError(f"kubernetes.training is `{kind}`, but TensorFlow's workers need an MPIJob; set it to auto")
        if self.trains_as_mpijob and self.container_engine == "pytorch" and self.images.train is None:
            raise ValueError("kubernetes.training is `mpijob`, for which PyTorch's images have no sshd; set it to auto")
        if self.kubernetes.efa and not (self.resources.cards and self.trains_as_mpijob):
            raise ValueError("kubernetes.efa is for an MPIJob of TensorFlow on cards; set it to 0")
        return self


# --- reading

Section = TypeVar("Section", bound=Settings)


def load_pipeline(
    path: Path | str | None, overrides: Iterable[str] = (), options: Mapping[str, tuple[str, object]] | None = None
) -> PipelineSettings:
    """Read a pipeline file, and apply options and then `--set` overrides (`key.path=value`, the value read as YAML).

    None reads no file: all settings have their defaults. `options` are the options of a command by the key that they set:
    `{"task.name": ("--task", "regression")}`; one whose value is None keeps its default.
    """
    source = str(path) if path is not None else "the settings"
    mapping: Any = {}
    if path is not None:
        mapping = parse_yaml(read_text(path), str(path))
        mapping = {} if mapping is None else mapping
        if not isinstance(mapping, dict):
            raise InputError(f"{path}: a pipeline file holds `key: value` pairs, not a {type(mapping).__name__}")
    typed = {}
    for key, (option, value) in (options or {}).items():
        if value == "":
            raise InputError(f"{option}: is empty; give it a value, or leave it out")
        if value is not None:
            typed[key] = f"{option} {value}"
            _set_key(mapping, key, value, typed[key])
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key:
            raise InputError(f"--set {shorten(override)}: write it as key.path=value, for example packing.depth=4")
        typed[key] = f"--set {override}"
        _set_key(mapping, key, _value_of(key, text, typed[key]), typed[key])
    return section_from_mapping(PipelineSettings, mapping, source, typed)


def section_from_mapping(
    section: type[Section], values: Mapping[str, Any], source: str, typed: Mapping[str, str] | None = None
) -> Section:
    """Validate one section alone; keys that are missing have their defaults.

    Errors name what the user `typed` for a key, and `source` for all other keys.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise InputError(first_problem(error, section, values, source, typed or {})) from error


def section_from_options(section: type[Section], **options: Any) -> Section:
    """The section that the options of a command make: `--max-predictions` sets max_predictions, None keeps its default.

    A command that needs no other section is spared their validation, which takes 0.1 s.
    """
    values = {name: value for name, value in options.items() if value is not None}
    typed = {name: f"--{name.replace('_', '-')} {value}" for name, value in values.items()}
    return section_from_mapping(section, values, "the options", typed)


def _set_key(mapping: dict[str, Any], key: str, value: object, typed: str) -> None:
    """Set one key; errors name what the user `typed`."""
    *parents, last = key.split(".")
    for parent in parents:
        if mapping.get(parent) is None:
            mapping[parent] = {}
        mapping = mapping[parent]
        if not isinstance(mapping, dict):
            raise InputError(f"{shorten(typed)}: `{shorten(parent)}` is a single value, it has no keys below it")
    mapping[last] = value


def _value_of(key: str, text: str, typed: str) -> object:
    value = parse_yaml(text, shorten(typed))
    field = field_at(PipelineSettings, key.split("."))
    kinds = plain_types(field.annotation) if field is not None else set()
    # A version such as 9.90 is a number or a date to YAML, but where only texts are taken it is a text.
    is_number = isinstance(value, int | float | date) and not isinstance(value, bool)
    return text.strip() if is_number and str in kinds and not kinds & {int, float} else value


# --- the page of all keys: `gaudi-bert settings`, docs/settings.md


def settings_schema() -> dict[str, Any]:
    """The JSON schema of a pipeline file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **PipelineSettings.model_json_schema()}


def settings_page(only: str | None = None, *, markdown: bool = True) -> list[str]:
    """The lines of the page, or those of one section or key alone; as Markdown, or for a terminal."""
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
            problem = f"no section or key of a pipeline file; {nearest_keys(only, PipelineSettings)}"
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
    "All keys are optional. `--set packing.depth=4` changes one on the command line. A wrong key or value is refused",
    "with the nearest right one. This page is `gaudi-bert settings`.",
)


def _keys(defaults: Settings, prefix: str, markdown: bool) -> Iterator[tuple[str, str]]:
    """Each key with its line, and each of those below it; the sections of a pipeline file have tables of their own."""
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


# --- YAML that people write: a key that is given twice is an error, which PyYAML passes over in silence

_MOST_CHARACTERS = 1 << 18


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` without repeated keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Construct a mapping as PyYAML does, but a key that is given twice is an error."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    name = shorten(key.value)
                    raise yaml.YAMLError(f"`{name}` is given twice, in lines {lines[key.value]} and {line}; give it once")
                lines[key.value] = line
        return node


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text, which errors call `source`."""
    if len(text) > _MOST_CHARACTERS:
        raise InputError(f"{source}: {len(text):,} characters; settings have at most {_MOST_CHARACTERS:,}")
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        reason = shorten(str(error.problem or error.context), 200)
        raise InputError(f"{source}: {where}not valid YAML: {reason}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML raises ValueError for numbers and dates that cannot be.
        reason = "nested too deep" if isinstance(error, RecursionError) else shorten(str(error), 240)
        raise InputError(f"{source}: not a YAML file: {reason}") from error
