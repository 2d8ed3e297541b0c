"""The unpacked files of a plan where they are now, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gaudi_bert.artefacts.plan import WritablePlan, read_writable_plan
from gaudi_bert.common.errors import InputError
from gaudi_bert.records.files import RecordFile, list_record_files
from gaudi_bert.records.read.group import GroupFile
from gaudi_bert.records.read.on_the_fly import OnTheFlyGroup

__all__ = ["match_files", "planned_groups"]


def planned_groups(records: str | Path, plan: Path) -> tuple[WritablePlan, list[OnTheFlyGroup]]:
    """A plan, and its groups with their files.

    Raises:
        InputError: the plan is not writable, or the files are not those of the plan.
    """
    content = read_writable_plan(plan)
    files = match_files(records, list_record_files(records), content)
    groups = [OnTheFlyGroup(tuple(files[name] for name in group.files), group.strategies) for group in content.groups]
    return content, groups


def match_files(records: str | Path, found: Sequence[RecordFile], plan: WritablePlan) -> dict[str, GroupFile]:
    """The files of the plan, by name, where they are now.

    Raises:
        InputError: one is missing, new or of another size.
    """
    there = {file.name: file for file in found}
    for name in sorted(set(there) - {file.name for file in plan.files}):
        raise InputError(f"{there[name].path}: is not in the plan; make the histogram and the plan again")
    matched = {}
    for file in plan.files:
        if file.name not in there:
            raise InputError(f"{records}: file {file.name} of the plan is missing; bring it back, or plan again")
        if there[file.name].bytes != file.bytes:
            raise InputError(
                f"{there[file.name].path}: {there[file.name].bytes} bytes, the plan was made for {file.bytes};"
                " make the histogram and the plan again"
            )
        matched[file.name] = GroupFile(file.name, there[file.name].path, file.bytes, file.crc32c, file.sequences)
    return matched
