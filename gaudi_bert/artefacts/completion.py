"""When a stage has nothing to do, and when it must refuse; and folders that are written in groups.

Every artefact has a settings file: the stage, its settings and the identity of its inputs. It is written before the
work starts, so half-done work is only ever resumed with its own settings; the artefact's final file is written last, so its
presence means that the artefact is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.mirrored_folder import fetch, is_mirrored, names_in, release, remove, shown_path
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import check_file_name, exclusive_lock, explain_os_errors, json_digest, read_json, write_json
from gaudi_bert.common.progress import Reporter


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
        return json_digest(self.as_json())


def read_signature(path: Path) -> Signature:
    """The signature that a settings file holds."""
    try:
        return TypeAdapter(Signature).validate_python(read_json(path))
    except ValidationError as error:
        raise InputError(f"{path}: is not an artefact's settings file; make it again with --overwrite") from error


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
    check_file_name(artefact)
    settings = settings_path(artefact, final)
    fetch(settings, final)
    difference = first_difference(read_json(settings), signature.as_json(), "now") if settings.exists() else None
    holds_something = artefact.exists()
    if artefact.is_dir():
        holds_something = any(not path.name.startswith(".") for path in _others(artefact, settings))
    if settings.exists() and difference is None:
        if final.exists():
            return True
    elif overwrite or not holds_something:
        remove_artefact(artefact, final)
    elif difference is not None:
        raise InputError(f"{artefact} was written otherwise ({difference}); choose another folder, or pass --overwrite")
    else:
        raise InputError(f"{artefact}: exists and is not ours; choose another folder, or pass --overwrite")
    write_json(settings, signature.as_json())
    return False


def remove_artefact(artefact: Path, final: Path | None = None) -> None:
    """Remove `artefact`, the final file first and the settings last: after a kill, the rest is refused or resumed."""
    settings = settings_path(artefact, final)
    with explain_os_errors(artefact, "remove"):
        if artefact.is_dir():
            others = [path for path in _others(artefact, settings) if not path.name.endswith(".lock")]  # it may be held
            remove(*sorted(others, key=lambda path: path != final))
        else:
            remove(artefact)
        remove(settings)


def _others(artefact: Path, settings: Path) -> list[Path]:
    folders = (artefact,) if settings.parent in (artefact, artefact.parent) else (artefact, settings.parent)
    paths = dict.fromkeys(folder / name for folder in folders if folder.is_dir() for name in names_in(folder))
    return [path for path in paths if path not in (settings, *folders)]


def first_difference(stored: Any, right: Any, expected: str, path: str = "") -> str | None:
    """The first key in which two JSON values differ, with both values; `expected` states where the right one comes from."""
    if isinstance(stored, dict) and isinstance(right, dict):
        pairs = [(f"{path}.{key}", stored.get(key, _ABSENT), right.get(key, _ABSENT)) for key in {**stored, **right}]
    elif isinstance(stored, list) and isinstance(right, list) and len(stored) == len(right):
        pairs = [(f"{path}[{number}]", *values) for number, values in enumerate(zip(stored, right, strict=True))]
    elif stored == right:
        return None
    else:
        before, now = ("absent" if value is _ABSENT else json.dumps(value) for value in (stored, right))
        return f"{path.removeprefix('.') or 'value'}: {shorten(before, 60)} there, {shorten(now, 60)} {expected}"
    return next(filter(None, (first_difference(one, other, expected, key) for key, one, other in pairs)), None)


_ABSENT = object()


# --- folders that are written in groups
#
# A group is a pure function of its inputs and the settings. Its files come first and its summary (a manifest) last; the
# folder's final file comes after all groups. So a killed run is continued by running it again. A kernel lock keeps two
# writers of one group apart; in an object store locks do not exist, and they put equal bytes.

_FETCHED_TOGETHER = 256
"""Summaries that are on scratch at once."""

Group = TypeVar("Group")
Summary = TypeVar("Summary", bound=Artefact)


@dataclass(frozen=True)
class GroupedOutput(Generic[Group, Summary]):
    """One such folder, whose file `final` is written last."""

    folder: Path
    final: Path
    signature: Signature
    summary: type[Summary]
    summary_path: Callable[[Group], Path]
    reporter: Reporter

    def begin(self, overwrite: bool) -> bool:
        """Make the folder ready; say whether it is finished already, which a read-only folder may be."""
        finished = is_finished(self.folder, self.final, self.signature)
        if not finished:
            with exclusive_lock(settings_path(self.folder, self.final), str(self.folder), wait=True):
                finished = begin_artefact(self.folder, self.final, self.signature, overwrite)
        if finished:
            self.reporter.say(f"{shown_path(self.folder)}: already there, nothing to do")
        return finished

    @contextmanager
    def removed_on_bad_input(self) -> Iterator[None]:
        """Inside the block, bad input leaves nothing half-written: a corrected input has no use for it."""
        try:
            yield
        except InputError:
            self.remove_all()
            raise

    def remove_all(self) -> None:
        """Remove what there is of the folder."""
        if is_mirrored(self.folder):
            remove(*(self.folder / name for name in names_in(self.folder)))
            return
        remove_artefact(self.folder, self.final)
        for folder in dict.fromkeys((self.final.parent, self.folder)):
            for path in folder.glob(".*.lock"):
                path.unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()

    def completed(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Summary]]:
        """Yield those of `groups` that are complete with their summaries; a store's are fetched some at a time."""
        for start in range(0, len(groups), _FETCHED_TOGETHER):
            some = groups[start : start + _FETCHED_TOGETHER]
            fetch(*map(self.summary_path, some))
            yield from ((group, summary) for group in some if (summary := self._read(group)) is not None)
            release(*map(self.summary_path, some))

    def missing(self, groups: Sequence[Group]) -> list[Group]:
        """Return those of `groups` that are still to be written."""
        completed = {group for group, _ in self.completed(groups)}
        if completed:
            self.reporter.say(f"{shown_path(self.folder)}: {len(completed)} of {len(groups)} groups are there already")
        return [group for group in groups if group not in completed]

    @contextmanager
    def writing(self, group: Group, name: str) -> Iterator[bool]:
        """Hold the lock of a group; whether it is still to be written: another writer may have ended meanwhile."""
        with exclusive_lock(self.summary_path(group), name):
            yield is_mirrored(self.folder) or self._read(group) is None

    def _read(self, group: Group) -> Summary | None:
        summary = self.summary.read_if_present(self.summary_path(group))
        return summary if summary is not None and self.is_complete(summary) else None

    def is_complete(self, summary: Summary) -> bool:
        """Whether a summary is of this output, and what it names is there."""
        return True

    def write_final(self, content: Artefact) -> None:
        """Write the final file, under a lock: several may finish at once."""
        with exclusive_lock(self.final, str(self.folder), wait=True):
            content.write(self.final)
