"""Decides whether a stage has nothing to do, resumes or rejects its folder; and folders that are written in groups.

Every artefact has a settings file: the stage, its settings and the identity of its inputs. It is written before the
work starts, so half-done work is only ever resumed with its own settings; the artefact's final file is written last, so its
presence means that the artefact is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.mirrored_folder import fetch, is_mirrored, release, remove, shown_path
from gaudi_bert.artefacts.owned_files import OWNED, is_owned, list_files_below
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
    """Return the signature that a settings file states.

    Raises:
        InputError: the file is not a settings file of ours.
    """
    try:
        return TypeAdapter(Signature).validate_python(read_json(path))
    except ValidationError as error:
        raise InputError(f"{path}: is not an artefact's settings file; remove it and make the artefact again") from error


def settings_path(artefact: Path, final: Path | None = None) -> Path:
    """Return the path of an artefact's settings file.

    For a folder it is `settings.json` next to the file `final`, which may be in a folder there. For a single file `x.json`
    it is `x.settings.json` next to it, and for any other file, such as `x.npy`, it is `x.npy.settings.json`, because files
    that differ in their ending only are different artefacts.

    Raises:
        InputError: the artefact is a single file, and its path has no file name.
    """
    if final == artefact or (final is None and artefact.suffix and not artefact.is_dir()):
        check_file_name(artefact)
        return artefact.with_name(f"{artefact.name.removesuffix('.json')}.settings.json")
    return (artefact if final is None else final.parent) / "settings.json"


def is_finished(artefact: Path, final: Path, signature: Signature) -> bool:
    """Return whether the finished artefact of this signature is there. Writes nothing, so a read-only folder will do.

    The arguments are those of `begin_artefact`.
    """
    settings = settings_path(artefact, final)
    fetch(settings, final)
    return settings.exists() and final.exists() and read_json(settings) == signature.as_json()


def begin_artefact(artefact: Path, final: Path, signature: Signature, overwrite: bool = False) -> bool:
    """Prepare to create `artefact`, whose file `final` is written last (the artefact itself if it is one file).

    Returns:
        True if the finished artefact of the same signature is there. False if there is work to do; the settings file is then
        written, and with `overwrite` the files of another signature are removed.

    Raises:
        InputError: the place is not free, as in `check_place`, or an artefact of another signature is there and `overwrite`
            is False.
    """
    if is_finished(artefact, final, signature):
        return True
    check_place(artefact, final, signature.stage, overwrite)
    settings = settings_path(artefact, final)
    difference = first_difference(read_json(settings), signature.as_json(), "now") if settings.exists() else None
    if difference is not None:
        own, foreign = _split_own_and_foreign_files(artefact, final, signature.stage)
        if not overwrite and not all(_is_hidden(path, artefact, final) for path in own):
            others = f", and also holds {foreign[0].name}" if foreign else ""
            remedy = "" if foreign else ", or pass --overwrite"
            raise InputError(
                f"{artefact}: was written with other settings ({difference}){others}; choose another folder{remedy}"
            )
        remove_artefact(artefact, final, signature.stage)
    write_json(settings, signature.as_json())
    return False


def check_place(artefact: Path, final: Path, stage: str, overwrite: bool = False) -> None:
    """Reject a place where `begin_artefact` would meet files that are not of this artefact. Writes and removes nothing.

    A command that locks its output calls this before it makes the lock.

    Raises:
        InputError: there are visible files, but no settings file of a stage that writes this artefact; or `overwrite` is
            True and there is a file, hidden or not, that the artefact cannot have written.
    """
    check_file_name(artefact)
    settings, owned = settings_path(artefact, final), OWNED[stage]
    fetch(settings, final)
    kind = "file" if final == artefact else "folder"
    is_ours = _is_settings_file_of(settings, owned.stages)
    if is_ours and not overwrite and artefact.is_dir() and final != artefact:
        return  # resumed, or rejected because of a setting: no reason to list the folder
    own, foreign = _split_own_and_foreign_files(artefact, final, stage)
    if not is_ours:
        there = [*own, *foreign, *([settings] if settings.exists() else [])]
        visible = [path for path in there if not _is_hidden(path, artefact, final)]
        if visible:
            met = f"{artefact}: already exists" if visible[0] == artefact else f"{artefact}: already holds {visible[0].name}"
            raise InputError(
                f"{met}, and no settings file says that `{owned.command}` wrote this {kind}; choose another {kind}"
            )
    elif foreign and (overwrite or artefact in foreign):
        raise InputError(
            f"{foreign[0]}: `{owned.command}` does not write this file, so nothing is removed; move it away, or choose "
            f"another {kind}"
        )


def remove_artefact(artefact: Path, final: Path, stage: str) -> None:
    """Remove the files of an artefact and its empty folders, and nothing else.

    The final file is removed first and the settings file last, so that what a kill leaves behind is rejected or resumed.
    The locks of the artefact itself stay, because they may be held. Locks in deeper folders are those of complete parts.
    """
    own, _ = _split_own_and_foreign_files(artefact, final, stage)
    files = [path for path in own if path.suffix != ".lock" or path.parent not in (artefact, final.parent)]
    with explain_os_errors(artefact, "remove"):
        remove(*sorted(files, key=lambda path: path != final))
        _remove_empty_folders({path.parent for path in files} - {artefact, artefact.parent, final.parent})
        remove(settings_path(artefact, final))


def _remove_empty_folders(folders: Iterable[Path]) -> None:
    for folder in sorted(folders, reverse=True):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def _split_own_and_foreign_files(artefact: Path, final: Path, stage: str) -> tuple[list[Path], list[Path]]:
    """Return what is in the place of an artefact, without its settings file: files that it can have written, and others."""
    owned, settings = OWNED[stage], settings_path(artefact, final)
    if final == artefact:
        is_file = artefact.is_file() and not artefact.is_symlink()
        there = [artefact] if os.path.lexists(artefact) else []
        return (there, []) if is_file else ([], there)
    if os.path.lexists(artefact) and not artefact.is_dir():
        return [], [artefact]
    places = [(artefact, owned.names)]
    if not final.is_relative_to(artefact):
        places.append((final.parent, owned.names_beside))
    own, foreign = list[Path](), list[Path]()
    for folder, names in places:
        for name, is_regular in list_files_below(folder):
            is_own = is_regular and is_owned(name, names)
            if folder / name != settings or not is_own:
                (own if is_own else foreign).append(folder / name)
    return own, foreign


def _is_settings_file_of(path: Path, stages: Sequence[str]) -> bool:
    """Return whether `path` is a settings file, and no link, that one of these stages wrote."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        return read_signature(path).stage in stages
    except InputError:
        return False


def _is_hidden(path: Path, artefact: Path, final: Path) -> bool:
    """Return whether a part of `path`, as seen from the artefact, begins with a dot."""
    folder = next((folder for folder in (artefact, final.parent) if path.is_relative_to(folder)), path.parent)
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


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
            check_place(self.folder, self.final, self.signature.stage, overwrite)
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
        """Remove the files of the artefact and their locks; files of others stay, and so does a folder that holds some."""
        remove_artefact(self.folder, self.final, self.signature.stage)
        if is_mirrored(self.folder):
            return
        own, _ = _split_own_and_foreign_files(self.folder, self.final, self.signature.stage)
        remove(*own)  # the locks
        _remove_empty_folders({self.folder, self.final.parent, *(path.parent for path in own)})

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
