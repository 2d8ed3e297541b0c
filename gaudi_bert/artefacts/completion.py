"""When a stage has nothing to do, and when it must refuse.

Every artefact has a settings file: the stage, its settings and the identity of its inputs. It is written before the
work starts, so half-done work is only ever resumed with the settings it was begun with; the artefact's final file is written
last, so its presence means that the artefact is complete. Together: same settings and final file present -> nothing to do;
same settings, no final file -> resume; other settings -> refuse and say which one differs, unless `overwrite` is set.
This is decided here, for commands and pipelines alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gaudi_bert.artefacts.store.mirrored_folder import fetch, names_in, remove
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import check_name, explained_os_errors, read_json, write_json


@dataclass(frozen=True)
class Signature:
    """Everything that an artefact is a function of. All values are JSON; no time, host, user or absolute path."""

    stage: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The signature as it is stored (and as it reads back: tuples as lists)."""
        value = {"stage": self.stage, "settings": dict(self.settings), "inputs": dict(self.inputs)}
        stored: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
        return stored

    def facts(self) -> dict[str, Any]:
        """Each setting and each input by its name: what processes that share the work compare."""
        settings = {f"{section}.{name}": value for section, own in self.settings.items() for name, value in own.items()}
        return {**settings, **self.inputs}

    @property
    def sha256(self) -> str:
        """The identity of all this."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode("utf-8")).hexdigest()


def read_signature(path: Path) -> Signature:
    """The signature that a settings file holds."""
    try:
        return TypeAdapter(Signature).validate_python(read_json(path))
    except ValidationError as error:
        raise InputError(
            f"{path}: is not the settings file of an artefact; make the artefact again with --overwrite"
        ) from error


def settings_path(artefact: Path, final: Path | None = None) -> Path:
    """Return where the settings of `artefact` are stored: `x.settings.json` next to a file, `settings.json` inside a folder.

    Inside a folder they are next to its `final` file, which may be in a folder there.
    """
    is_file = final in (None, artefact) and not artefact.is_dir()
    if artefact.suffix and is_file:
        return artefact.with_name(f"{artefact.stem}.settings.json")
    return (artefact if final is None else final.parent) / "settings.json"


def is_finished(artefact: Path, final: Path, signature: Signature) -> bool:
    """Whether the finished artefact of the same signature is there. Nothing is written, so a read-only folder will do.

    The arguments are those of `begin_artefact`.
    """
    settings = settings_path(artefact, final)
    fetch(settings, final)
    return settings.exists() and final.exists() and read_json(settings) == signature.as_json()


def begin_artefact(artefact: Path, final: Path, signature: Signature, overwrite: bool = False) -> bool:
    """Prepare to create `artefact`, whose file `final` is written last (the artefact itself when it is one file).

    True when the finished artefact of the same signature is there; False when there is work to do (the settings file has
    then been written). What is not ours, or has another signature, is refused without `overwrite`, and removed with it.
    """
    check_name(artefact)
    settings = settings_path(artefact, final)
    fetch(settings, final)
    difference = _other_settings(read_json(settings), signature.as_json()) if settings.exists() else None
    holds_something = artefact.exists()
    if artefact.is_dir():
        holds_something = any(not path.name.startswith(".") for path in _others(artefact, settings))
    if settings.exists() and difference is None:
        if final.exists():
            return True
    elif overwrite or not holds_something:
        remove_artefact(artefact, final)
    elif difference is not None:
        raise InputError(f"{artefact} was written {difference}: choose another folder, or pass --overwrite")
    else:
        raise InputError(
            f"{artefact}: exists, but {settings.name} does not describe it; choose another folder, or pass --overwrite"
        )
    write_json(settings, signature.as_json())
    return False


def remove_artefact(artefact: Path, final: Path | None = None) -> None:
    """Remove `artefact`, the final file first and the settings last: after a kill, the rest is refused or resumed."""
    settings = settings_path(artefact, final)
    with explained_os_errors(artefact, "remove"):
        if artefact.is_dir():
            others = [path for path in _others(artefact, settings) if not path.name.endswith(".lock")]  # it may be held
            remove(*sorted(others, key=lambda path: path != final))
        else:
            remove(artefact)
        remove(settings)


def _others(artefact: Path, settings: Path) -> list[Path]:
    """Return the content of a folder and of the folder of its settings, but for the settings."""
    folders = (artefact,) if settings.parent in (artefact, artefact.parent) else (artefact, settings.parent)
    paths = dict.fromkeys(folder / name for folder in folders if folder.is_dir() for name in names_in(folder))
    return [path for path in paths if path not in (settings, *folders)]


# Settings that have an option of their own, by which users know them; all others are keys.
# fmt: off
OPTIONS = frozenset([
    "algorithm", "columns", "depth", "duplicates", "evaluation_fraction", "group_bytes", "leftovers",
    "masked_slots", "max_predictions", "max_sequence_length", "pooling", "seed", "to", "too_long", "train_vocab", "vocab",
    "whole_word_masking",
])
# fmt: on


def _other_settings(stored: Any, requested: Any) -> str | None:
    """The first setting or input in which the stored artefact differs from the requested one."""
    difference = _first_difference(stored, requested)
    if difference is None:
        return None
    keys, *values = difference
    kind, *inner = keys or ("settings", "value")
    before, now = ("nothing" if value is _ABSENT else _short(value).strip('"') for value in values)
    if kind == "inputs":
        return f"from other input ({_joined(inner)}: {before} there, {now} now)"
    if kind == "stage":
        return f"by `{before}`, not by `{now}`"
    name = f"--{inner[0].replace('_', '-')} " if len(inner) == 1 and inner[0] in OPTIONS else f"{_joined(inner)} = "
    return f"with {name}{before}, not {name}{now}"


def first_difference(stored: Any, right: Any, expected: str) -> str | None:
    """The first key in which two JSON values differ, with both values; `expected` states where the right one comes from."""
    difference = _first_difference(stored, right)
    if difference is None:
        return None
    keys, *values = difference
    before, now = ("absent" if value is _ABSENT else _short(value) for value in values)
    return f"{_joined(keys) or 'value'}: {before} there, {now} {expected}"


def _joined(keys: Sequence[str]) -> str:
    """A path as messages have it: `shards[2].bytes`."""
    return "".join(key if key.startswith("[") else f".{key}" for key in keys).removeprefix(".")


_ABSENT = object()


def _first_difference(stored: Any, right: Any) -> tuple[tuple[str, ...], Any, Any] | None:
    """The path to the first difference of two JSON values, and both values there."""
    if isinstance(stored, dict) and isinstance(right, dict):
        pairs = [(str(key), stored.get(key, _ABSENT), right.get(key, _ABSENT)) for key in {**stored, **right}]
    elif isinstance(stored, list) and isinstance(right, list) and len(stored) == len(right):
        pairs = [(f"[{number}]", *values) for number, values in enumerate(zip(stored, right, strict=True))]
    else:
        return None if stored == right else ((), stored, right)
    for key, one, other in pairs:
        difference = _first_difference(one, other)
        if difference is not None:
            return (key, *difference[0]), *difference[1:]
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
