"""Checks whether the output of a stage is complete, can be resumed or belongs to something else, and supports folders that
are written group by group.

Every output (artefact) has a settings file, which contains the stage, its settings and the identity of its inputs
(`Signature`). It is written before the work starts, so that unfinished work is only resumed with the same settings. The
final file of an output is written last, so an output is complete if this file exists. `GroupedOutput` writes a folder group
by group.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.mirrored_folder import (
    download_missing_files,
    format_path,
    is_mirrored,
    list_names,
    remove_files,
    remove_local_copies,
)
from gaudi_bert.artefacts.work_folder import OWNED, is_owned
from gaudi_bert.common.errors import InputError, shorten
from gaudi_bert.common.files import check_path_to_write, exclusive_lock, explain_os_errors, hash_json, read_json, write_json
from gaudi_bert.common.progress import Reporter


@dataclass(frozen=True)
class Signature:
    """The stage, the settings and the inputs that determine the content of an output file or folder.

    All values are JSON values. They do not contain a time, a host, a user or an absolute path, so that the same artefact has
    the same signature everywhere.

    Attributes:
        stage: The name of the stage.
        settings: The settings of the stage.
        inputs: The identities of the inputs, such as checksums.
    """

    stage: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the signature as JSON values. Tuples become lists, so that the result equals the content of the settings
        file.
        """
        stored: dict[str, Any] = json.loads(json.dumps(asdict(self), allow_nan=False))
        return stored

    def to_flat_dict(self) -> dict[str, Any]:
        """Return all settings and inputs in one flat dictionary.

        The processes of a training run compare these dictionaries. The settings must be grouped in sections. A setting has
        the key `section.name`.
        """
        return {
            **{f"{section}.{key}": value for section, values in self.settings.items() for key, value in values.items()},
            **self.inputs,
        }

    @property
    def sha256(self) -> str:
        """The SHA-256 of the signature."""
        return hash_json(self.as_json())


def read_signature(path: Path) -> Signature:
    """Read a settings file, and return the signature that it contains.

    Raises:
        InputError: The file cannot be read, or is not a settings file of this package.
    """
    try:
        return TypeAdapter(Signature).validate_python(read_json(path))
    except ValidationError as error:
        raise InputError(
            f"{path}: the file is not a settings file of gaudi-bert; remove it, and create the artefact again"
        ) from error


def settings_path(artefact: Path, completion_marker: Path | None = None) -> Path:
    """Return the path of the settings file that belongs to an output file or folder.

    For a folder, it is `settings.json` in the folder of the file `completion_marker`. For a single file `x.json`, it is
    `x.settings.json` next to the file. For any other file, such as `x.npy`, it is `x.npy.settings.json`, because files that
    differ only in their suffix are different artefacts.

    Args:
        artefact: The output folder or file.
        completion_marker: The file that is written last and marks the output as complete. If the output is a single file,
            it is this file. By default, a path that has a suffix and is not a folder is considered a single file, and
            any other path a folder that contains the marker.

    Raises:
        InputError: The output is a single file, and its path has no file name.
    """
    if completion_marker == artefact or (completion_marker is None and artefact.suffix and not artefact.is_dir()):
        check_path_to_write(artefact)
        return artefact.with_name(f"{artefact.name.removesuffix('.json')}.settings.json")
    return (artefact if completion_marker is None else completion_marker.parent) / "settings.json"


def is_artefact_finished(artefact: Path, completion_marker: Path, signature: Signature) -> bool:
    """Return whether an output file or folder is complete and has the given signature.

    Nothing is written.

    Args:
        artefact: The output folder or file.
        completion_marker: The file that is written last and marks the output as complete. If the output is a single file,
            it is this file.
        signature: The expected signature.
    """
    settings = settings_path(artefact, completion_marker)
    download_missing_files(settings, completion_marker)
    return settings.exists() and completion_marker.exists() and read_json(settings) == signature.as_json()


def begin_artefact_unless_finished(
    artefact: Path, completion_marker: Path, signature: Signature, overwrite: bool = False
) -> bool:
    """Prepare to write an output file or folder. Return True if it is already complete, so there is nothing to do.

    Otherwise, write the settings file. If there is an output with another signature and `overwrite` is set, remove it first.

    Args:
        artefact: The output folder or file.
        completion_marker: The file that is written last and marks the output as complete. If the output is a single file,
            it is this file.
        signature: The signature of the output.
        overwrite: Whether to replace an output with another signature.

    Returns:
        True if the output is complete and has this signature. False if there is work to do.

    Raises:
        InputError: The path contains other files (see `check_output_path`), or an output with another signature although
            `overwrite` is not set.
    """
    if is_artefact_finished(artefact, completion_marker, signature):
        return True
    check_output_path(artefact, completion_marker, signature.stage, overwrite)
    settings = settings_path(artefact, completion_marker)
    difference = describe_first_difference(read_json(settings), signature.as_json(), "now") if settings.exists() else None
    if difference is not None:
        own, foreign = _split_own_and_foreign_files(artefact, completion_marker, signature.stage)
        if not overwrite and not all(_is_dotfile(path, artefact, completion_marker) for path in own):
            others, remedy = (f" and contains {foreign[0].name}", "") if foreign else ("", ", or pass --overwrite")
            raise InputError(
                f"{artefact}: the output was written with other settings ({difference}){others}; choose another "
                f"output{remedy}"
            )
        remove_artefact(artefact, completion_marker, signature.stage)
    write_json(settings, signature.as_json())
    return False


def check_output_path(artefact: Path, completion_marker: Path, stage: str, overwrite: bool = False) -> None:
    """Check that a path is free for the output of a stage, or already contains an output of this stage.

    Nothing is written or removed.

    A command that locks its output calls this function before it creates the lock file.

    Args:
        artefact: The output folder or file.
        completion_marker: The file that is written last and marks the output as complete. If the output is a single file,
            it is this file.
        stage: The stage that writes the output.
        overwrite: Whether the files of an existing output would be removed.

    Raises:
        InputError: There are visible files, but no settings file of a stage that writes this output. If `overwrite` is set,
            any file that does not belong to the output is an error, even a hidden one.
    """
    check_path_to_write(artefact)
    settings, owned = settings_path(artefact, completion_marker), OWNED[stage]
    download_missing_files(settings, completion_marker)
    kind = "file" if completion_marker == artefact else "folder"
    is_ours = _is_settings_file_of(settings, owned.stages)
    if is_ours and not overwrite and artefact.is_dir() and completion_marker != artefact:
        return  # listing the folder may be slow, and is not needed, because the caller compares the settings
    own, foreign = _split_own_and_foreign_files(artefact, completion_marker, stage)
    if not is_ours:
        existing = [*own, *foreign, *([settings] if settings.exists() else [])]
        visible = [path for path in existing if not _is_dotfile(path, artefact, completion_marker)]
        if visible:
            problem = "already exists" if visible[0] == artefact else f"already contains {visible[0].name}"
            raise InputError(
                f"{artefact}: {problem}, and no settings file shows that `{owned.command}` wrote this {kind}, so "
                f"nothing is overwritten; choose another {kind}"
            )
    elif foreign and (overwrite or artefact in foreign):
        raise InputError(
            f"{foreign[0]}: `{owned.command}` does not write this file, so nothing is removed; move the file, or choose "
            f"another {kind}"
        )


def remove_artefact(artefact: Path, completion_marker: Path, stage: str) -> None:
    """Remove the output files of a stage, and the folders that become empty.

    The final file is removed first and the settings file last. If the process is killed in between, the remaining files are
    therefore not mistaken for a complete output. Lock files directly in the folder stay, because another process may hold
    them. Lock files in deeper folders belong to complete parts and are removed.

    Args:
        artefact: The output folder or file.
        completion_marker: The file that is written last and marks the output as complete. If the output is a single file,
            it is this file.
        stage: The stage that writes the output.
    """
    own, _ = _split_own_and_foreign_files(artefact, completion_marker, stage)
    files = [path for path in own if path.suffix != ".lock" or path.parent not in (artefact, completion_marker.parent)]
    with explain_os_errors(artefact, "remove"):
        remove_files(*sorted(files, key=lambda path: path != completion_marker))
        _remove_empty_folders({path.parent for path in files} - {artefact, artefact.parent, completion_marker.parent})
        remove_files(settings_path(artefact, completion_marker))


def _remove_empty_folders(folders: Iterable[Path]) -> None:
    """Remove each of the given folders if it is empty. Sub-folders are removed before their parents, and symbolic links are
    kept.
    """
    for folder in sorted(folders, reverse=True):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def _split_own_and_foreign_files(artefact: Path, completion_marker: Path, stage: str) -> tuple[list[Path], list[Path]]:
    """List the files at an output path in two groups: files that the stage can have written, and all other files. The
    settings file is not listed.

    Returns:
        (files that can belong to the output, all other files).
    """
    owned, settings = OWNED[stage], settings_path(artefact, completion_marker)
    if completion_marker == artefact:
        existing = [artefact] if os.path.lexists(artefact) else []
        return (existing, []) if artefact.is_file() and not artefact.is_symlink() else ([], existing)
    if os.path.lexists(artefact) and not artefact.is_dir():
        return [], [artefact]
    places = [(artefact, owned.names)]
    if not completion_marker.is_relative_to(artefact):
        places.append((completion_marker.parent, owned.names_beside))
    own, foreign = list[Path](), list[Path]()
    for folder, names in places:
        for name, is_regular in _list_files_below(folder):
            is_own = is_regular and is_owned(name, names)
            if folder / name != settings or not is_own:
                (own if is_own else foreign).append(folder / name)
    return own, foreign


def _list_files_below(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield (relative path, whether it is a regular file) for each file in a folder and its sub-folders.

    Symbolic links are not followed. Folders without read permission are skipped, because nothing in them can be removed.
    """
    if is_mirrored(folder):
        yield from ((name, True) for name in list_names(folder))
        return
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from ((f"{entry.name}/{name}", is_regular) for name, is_regular in _list_files_below(Path(entry)))
            else:
                yield entry.name, entry.is_file(follow_symlinks=False)


def _is_settings_file_of(path: Path, stages: Sequence[str]) -> bool:
    """Return whether `path` is a settings file that one of the given stages wrote. Return False for symbolic links."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        return read_signature(path).stage in stages
    except InputError:
        return False


def _is_dotfile(path: Path, artefact: Path, completion_marker: Path) -> bool:
    """Return whether a file is hidden, that is, whether any part of its path in the output folder begins with a dot."""
    folder = next((folder for folder in (artefact, completion_marker.parent) if path.is_relative_to(folder)), path.parent)
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def describe_first_difference(
    stored: Any, expected: Any, expected_origin: str, *, ignored_key: str | None = None, key_path: str = ""
) -> str | None:
    """Describe the first difference between two JSON values. Return None if they are equal.

    Args:
        stored: The value that was read from a file.
        expected: The expected value.
        expected_origin: The origin of the expected value, such as "now", for the text.
        ignored_key: A key whose values may differ, such as `settings.training.updates`, or None.
        key_path: The key of the values, for recursive calls.

    Returns:
        Text with the key and both values, or None if the values are equal.
    """
    if isinstance(stored, dict) and isinstance(expected, dict):
        pairs = [
            (f"{key_path}.{key}", stored.get(key, _ABSENT), expected.get(key, _ABSENT)) for key in {**stored, **expected}
        ]
    elif isinstance(stored, list) and isinstance(expected, list) and len(stored) == len(expected):
        pairs = [(f"{key_path}[{number}]", *values) for number, values in enumerate(zip(stored, expected, strict=True))]
    else:
        key = key_path.removeprefix(".") or "value"
        if stored == expected or key == ignored_key:
            return None
        before, now = ("missing" if value is _ABSENT else json.dumps(value) for value in (stored, expected))
        return f"{key}: {shorten(before, 60)} in the file, {shorten(now, 60)} {expected_origin}"
    differences = (
        describe_first_difference(one, other, expected_origin, ignored_key=ignored_key, key_path=key)
        for key, one, other in pairs
    )
    return next(filter(None, differences), None)


_ABSENT = object()


# --- folders that are written in groups
#
# The files of a group depend only on its inputs and the settings. The summary of a group (such as a manifest) is written
# after its other files, and the final file of the folder is written after all groups. A killed run is therefore continued by
# running the same command again. A kernel lock prevents two processes from writing the same group at the same time. Object
# stores have no locks, but two processes that write the same group there upload the same bytes.

# If the output is in an object store, its summary files are downloaded and read in batches of this many. Each batch is
# removed from the local disk before the next one is downloaded.
_SUMMARIES_PER_BATCH = 256

Group = TypeVar("Group")
Summary = TypeVar("Summary", bound=Artefact)


@dataclass(frozen=True)
class GroupedOutput(Generic[Group, Summary]):
    """An output folder that a stage writes one group of files at a time, so that a killed run can be resumed.

    Attributes:
        folder: The output folder.
        final: The file that is written after all groups.
        signature: The signature of the folder.
        summary: The type of the summary file, which is written last in each group.
        summary_path: Returns the path of a group's summary file.
        reporter: Prints messages.
    """

    folder: Path
    final: Path
    signature: Signature
    summary: type[Summary]
    summary_path: Callable[[Group], Path]
    reporter: Reporter

    def begin_unless_finished(self, overwrite: bool) -> bool:
        """Prepare the folder for writing. Return True if it is already complete, so there is nothing to do.

        A complete folder may be read-only.

        Raises:
            InputError: The folder contains other files, or has another signature and `overwrite` is not set.
        """
        finished = is_artefact_finished(self.folder, self.final, self.signature)
        if not finished:
            check_output_path(self.folder, self.final, self.signature.stage, overwrite)
            with exclusive_lock(settings_path(self.folder, self.final), str(self.folder), wait=True):
                finished = begin_artefact_unless_finished(self.folder, self.final, self.signature, overwrite)
        if finished:
            self.reporter.say(f"{format_path(self.folder)}: the output already exists, so there is nothing to do")
        return finished

    @contextmanager
    def remove_files_on_bad_input(self) -> Iterator[None]:
        """Remove all files that this stage wrote to the folder if the `with` block raises an InputError.

        The input has to be corrected, and unfinished work cannot be resumed with another input.
        """
        try:
            yield
        except InputError:
            self.remove_files()
            raise

    def remove_files(self) -> None:
        """Remove all files of this output, including lock files, and the folders that become empty. Other files are kept."""
        remove_artefact(self.folder, self.final, self.signature.stage)
        if is_mirrored(self.folder):
            return
        own, _ = _split_own_and_foreign_files(self.folder, self.final, self.signature.stage)
        remove_files(*own)  # these are lock files, which `remove_artefact` keeps
        _remove_empty_folders({self.folder, self.final.parent, *(path.parent for path in own)})

    def read_complete_groups(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Summary]]:
        """Yield (group, content of its summary file) for each of the given groups that is complete.

        The summary files of an output in an object store are downloaded in batches of 256.
        """
        for start in range(0, len(groups), _SUMMARIES_PER_BATCH):
            some = groups[start : start + _SUMMARIES_PER_BATCH]
            download_missing_files(*map(self.summary_path, some))
            yield from ((group, summary) for group in some if (summary := self._read_summary(group)) is not None)
            remove_local_copies(*map(self.summary_path, some))

    def find_missing_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that still have to be written. Print how many groups are already complete."""
        completed = {group for group, _ in self.read_complete_groups(groups)}
        if completed:
            self.reporter.say(f"{format_path(self.folder)}: {len(completed)} of {len(groups)} groups are already complete")
        return [group for group in groups if group not in completed]

    @contextmanager
    def lock_group(self, group: Group, name: str) -> Iterator[bool]:
        """Lock a group of output files while the `with` block runs, so that no other process writes the group.

        Args:
            group: The group.
            name: The name of the group for messages.

        Yields:
            Whether the group must still be written. Another process may have completed it before the lock was acquired.

        Raises:
            FailedError: Another process holds the lock.
        """
        with exclusive_lock(self.summary_path(group), name):
            yield is_mirrored(self.folder) or self._read_summary(group) is None

    def _read_summary(self, group: Group) -> Summary | None:
        """Read the summary file of a group. Return None if files of the group are missing."""
        summary = self.summary.read_if_present(self.summary_path(group))
        return summary if summary is not None and self.is_group_complete(summary) else None

    def is_group_complete(self, summary: Summary) -> bool:
        """Return whether all files of a group exist and belong to this output. Subclasses override this method.

        Args:
            summary: The content of the group's summary file.
        """
        return True

    def write_final_file(self, content: Artefact) -> None:
        """Write the file that marks the folder as complete. A lock is held, because several processes may finish at the same
        time.
        """
        with exclusive_lock(self.final, str(self.folder), wait=True):
            content.write(self.final)
