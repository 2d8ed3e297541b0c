"""When a stage has nothing to do, and when it must refuse.

Beside every artefact lies a settings file: the stage, its settings and the identity of its inputs. It is written before the
work starts, so half-done work is only ever resumed with the settings it was begun with; the artefact's final file is written
last, so its presence means that the artefact is whole. Together: same settings and final file present -> nothing to do;
same settings, no final file -> resume; other settings -> refuse and say which one differs, unless told to overwrite.
This is decided here, for commands and pipelines alike.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import check_name, explained_os_errors, read_json, write_json

__all__ = ["Signature", "begin_artefact", "is_finished", "read_signature", "remove_artefact", "settings_path"]


@dataclass(frozen=True)
class Signature:
    """What an artefact is a function of. All values are JSON; no time, host, user or absolute path."""

    stage: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The signature as it is stored (and as it reads back: tuples as lists)."""
        value = {"stage": self.stage, "settings": dict(self.settings), "inputs": dict(self.inputs)}
        stored: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
        return stored


@cache
def _stored() -> TypeAdapter[Signature]:
    return TypeAdapter(Signature)


def read_signature(path: Path) -> Signature:
    """The signature that a settings file holds.

    Raises:
        InputError: it is missing or damaged.
    """
    try:
        return _stored().validate_python(read_json(path))
    except ValidationError as error:
        raise InputError(f"{path}: is no settings file of an artefact; make the artefact again with --overwrite") from error


def settings_path(artefact: Path) -> Path:
    """Where the settings of `artefact` are kept: `x.settings.json` beside a file, `settings.json` inside a folder."""
    return artefact.with_name(f"{artefact.stem}.settings.json") if artefact.suffix else artefact / "settings.json"


def is_finished(artefact: Path, final: Path, signature: Signature, sources: Iterable[Path] = ()) -> bool:
    """Whether the finished artefact of the same signature is there. Nothing is written, so a read-only folder will do.

    Args:
        artefact, final, signature: as in `begin_artefact`.
        sources: files that a signature knows by name and size only: none may have changed since `final` was written.
    """
    kept = settings_path(artefact)
    if not kept.exists() or not final.exists():
        return False
    if first_difference(read_json(kept), signature.as_json()) is not None:
        return False
    written = final.stat().st_mtime_ns
    return all(source.stat().st_ctime_ns <= written for source in sources)


def begin_artefact(artefact: Path, final: Path, signature: Signature, overwrite: bool = False) -> bool:
    """Prepare to make `artefact`; say whether it is already finished.

    Args:
        artefact: the file or folder that the stage makes.
        final: the file of it that is written last (the artefact itself when it is one file).
        signature: the settings and inputs of this run.
        overwrite: remove what other settings made, and whatever is there without settings.

    Returns:
        True when the finished artefact of the same signature is there; False when there is work to do (the settings file
        has then been written).

    Raises:
        InputError: the artefact was made from other settings or inputs, or is not ours, and `overwrite` is False; or it
            has no name of its own.
    """
    check_name(artefact)
    kept = settings_path(artefact)
    wanted = signature.as_json()
    if kept.exists():
        difference = first_difference(read_json(kept), wanted)
        if difference is None:
            if final.exists():
                return True
        elif not overwrite and _holds_something(artefact):
            raise InputError(f"{artefact}: made with another {difference}; choose another folder, or pass --overwrite")
        else:
            remove_artefact(artefact, kept)
    elif _holds_something(artefact):
        if not overwrite:
            raise InputError(
                f"{artefact}: exists, but {kept.name} does not say what made it; choose another folder, or pass --overwrite"
            )
        remove_artefact(artefact, kept)
    write_json(kept, wanted)
    return False


def remove_artefact(artefact: Path, kept: Path) -> None:
    """Remove `artefact`, the settings last, so that a kill half-way leaves something that is refused or resumed."""
    with explained_os_errors(artefact, "remove"):
        if artefact.is_dir():
            for child in sorted(artefact.iterdir()):
                if child != kept and child.suffix != ".lock":  # a lock that is held must stay
                    shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        else:
            artefact.unlink(missing_ok=True)
        kept.unlink(missing_ok=True)


def _holds_something(artefact: Path) -> bool:
    if artefact.is_dir():
        made = (child for child in artefact.iterdir() if child != settings_path(artefact))
        return any(not child.name.startswith(".") for child in made)
    return artefact.exists()


def first_difference(made: Any, wanted: Any, place: str = "") -> str | None:
    """The first place where two signatures differ, as `place: 3 -> 4`; None where they are equal."""
    if isinstance(made, dict) and isinstance(wanted, dict):
        for key in [*made, *(key for key in wanted if key not in made)]:
            inner = f"{place}.{key}" if place else str(key)
            if key not in made or key not in wanted:
                present = "absent" if key not in made else _short(made[key])
                asked = "absent" if key not in wanted else _short(wanted[key])
                return f"{inner}: {present} there, {asked} asked for"
            difference = first_difference(made[key], wanted[key], inner)
            if difference is not None:
                return difference
        return None
    if isinstance(made, list) and isinstance(wanted, list) and len(made) == len(wanted):
        for index, (one, other) in enumerate(zip(made, wanted, strict=True)):
            difference = first_difference(one, other, f"{place}[{index}]")
            if difference is not None:
                return difference
        return None
    if made == wanted:
        return None
    return f"{place or 'value'}: {_short(made)} there, {_short(wanted)} asked for"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
