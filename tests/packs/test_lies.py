"""The table of lies: every key of every file that `verify` and `write` read, changed in many ways, is refused by name.

What no reader can know to be false is listed here, with the reason.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tfrecords.verify import verify_records
from gaudi_bert.tfrecords.write import write_packed_records
from tests.builders import tables
from tests.builders.packing_case import make_case
from tests.builders.reporters import a_run

_NO_CHANGE = object()
_GONE = object()


def other(value: Any) -> Any:
    """Another value of the same form; of counts by length, as many sequences and tokens at other lengths."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.99
    if isinstance(value, str):
        return "0" * len(value) if len(value) in (16, 64) else f"{value}x"
    if not isinstance(value, list) or len(value) < 5 or not all(type(count) is int for count in value):
        return _NO_CHANGE
    first = next(length for length, count in enumerate(value) if count and length >= 1)
    second = next(length for length in range(first + 2, len(value)) if value[length])
    changed = list(value)
    for length, change in ((first, -1), (first + 1, 1), (second, -1), (second - 1, 1)):
        changed[length] += change
    return changed


def less(value: Any) -> Any:
    if isinstance(value, list):
        return value[:-1]
    return value // 2 if type(value) is int else _NO_CHANGE


def more(value: Any) -> Any:
    if isinstance(value, dict):
        return {**value, "surprise": 1}
    return [*value, value[-1]] if isinstance(value, list) and value else _NO_CHANGE


WAYS: dict[str, Callable[[Any], Any]] = {
    "other": other,
    "less": less,
    "more": more,
    "negative": lambda value: -1,
    "null": lambda value: None,
    "gone": lambda value: _GONE,
}

NAME = {"tool_version": {"other"}}  # nothing is computed from it
MORE = {"": {"more"}}  # keys of later versions are ignored
UNPROVABLE: dict[str, dict[str, set[str]]] = {
    # The settings of a packed folder, which are stored in it, have its seed and algorithm.
    "records/metadata.json": NAME,
    "records/settings.json": MORE,
    "records/group-00000.json": {},
    "table/metadata.json": NAME,
    "table/settings.json": MORE,
    "table/group-00001.json": {},
    "rows/row_lengths.json": {},
    "rows/settings.json": MORE,
    "rows/metadata.json": NAME,
    "records/plan.json": {
        "seed": {"other", "less", "negative"},  # with any seed the packs are as good
        # Settings: with other values too the plan packs every sequence, within its limits.
        "depth": {"other"},
        "shard_multiple": {"other", "less"},
        "shard_bytes": {"other", "less"},
        "histogram_sha256": {"other"},  # the histogram is no input of `write`
        "totals.masked_slots_needed": {"less", "null"},
        "groups[].bound_prices": {"other", "null"},  # with other prices too the bound may be proven
        "groups[].bound_prices[]": {"other", "less"},
    },
}


def changes_of(value: Any, key: str = "") -> Iterator[tuple[str, str, Any]]:
    """The key (`shards[].packs`), the way and the result of every change; of lists the first and the last entry change."""
    for way, change in WAYS.items():
        new = change(value)
        if new is not _NO_CHANGE and (type(new) is not type(value) or new != value) and (key or way == "more"):
            yield key.lstrip("."), way, new
    if isinstance(value, dict):
        for name, own in value.items():
            for changed, way, new in changes_of(own, f"{key}.{name}"):
                rest = {other: kept for other, kept in value.items() if other != name}
                yield changed, way, rest if new is _GONE else {**value, name: new}
    if isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else set()):
            for changed, way, new in changes_of(value[index], f"{key}[]"):
                if new is not _GONE:
                    yield changed, way, [*value[:index], new, *value[index + 1 :]]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed TFRecords of two groups, with a vocabulary."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "vocab.txt").write_text("word\n" * 30522)
    make_case(folder, files=4, sequences_per_file=9, max_sequence_length=13, max_predictions=3, shard_multiple=4)
    verify_records(folder / "records", folder / "packed", a_run())
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed table of two groups, from two files."""
    pytest.importorskip("pyarrow", exc_type=ImportError)
    from gaudi_bert.tables.pack import pack_table

    folder = tmp_path_factory.mktemp("table")
    (folder / "rows").mkdir()
    for number in range(2):
        tables.write_parquet(folder / "rows" / f"part-{number}.parquet", tables.random_rows(14, 9, seed=number))
    settings = TableSettings(
        max_sequence_length=8, shard_multiple=4, depth=3, algorithm="nnls", too_long="split", group_sequences=14
    )
    pack_table(folder / "rows", folder / "packed", settings, a_run(), verify=True)
    return folder


@pytest.fixture(scope="module")
def rows(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in rows of two lengths."""
    from gaudi_bert.tables.pack import pack_table

    folder = tmp_path_factory.mktemp("rows")
    shutil.copytree(table / "rows", folder / "rows")
    settings = TableSettings(max_sequence_length=9, row_lengths=(8, 9), shard_multiple=4, algorithm="nnls")
    pack_table(folder / "rows", folder / "packed", settings, a_run(), verify=True)
    return folder


def accepted_changes(path: Path, read: Callable[[], object]) -> set[tuple[str, str]]:
    """Change a file in each way, one at a time: the changes that `read` does not refuse."""
    before, accepted = path.read_bytes(), set()
    try:
        for key, way, content in changes_of(json.loads(before)):
            path.write_text(json.dumps(content))
            try:
                read()
                accepted.add((key, way))
            except GaudiBertError as error:
                if re.match(r"/\S+: ", str(error)) is None:
                    pytest.fail(f"{key}, {way} is refused without a file's name: {error}")
    finally:
        path.write_bytes(before)
    read()  # as it is
    return accepted


def reading(workdir: Path, file: str, out: Path) -> Callable[[], object]:
    """What reads `file` and believes it or not."""
    records, packed = workdir / "records", workdir / "packed"
    if "plan" in file:
        numbers = itertools.count()
        return lambda: write_packed_records(records, workdir / "plan.json", out / str(next(numbers)), a_run())
    if file.startswith("records"):
        return lambda: verify_records(records, packed, a_run())
    from gaudi_bert.tables.verify import verify_table

    return lambda: verify_table(workdir / "rows", packed, a_run())


@pytest.mark.parametrize("file", sorted(UNPROVABLE))
def test_no_key_is_believed_but_what_no_reader_can_know(file: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    workdir = request.getfixturevalue(file.partition("/")[0])
    folders = (workdir, workdir / "packed", workdir / "packed" / NOTES_NAME, workdir / "packed" / "rows-8" / NOTES_NAME)
    path = next(path for folder in folders if (path := folder / Path(file).name).exists())
    listed = {(key, way) for key, ways in UNPROVABLE[file].items() for way in ways}
    assert accepted_changes(path, reading(workdir, file, tmp_path)) == listed
