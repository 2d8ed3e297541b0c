"""The table of lies: every key of every file that `verify` and `write` read, changed in many ways, is refused by name.

What no reader can know to be false is listed here, with the reason. `make test` changes each key once and some in other
ways; `make test-long` tries all of them, and that each entry of the list is needed.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gaudi_bert.artefacts.base import NOTES_NAME
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.tfrecords.verify import verify
from gaudi_bert.tfrecords.write import write
from tests.builders import tables
from tests.builders.effort import LONG, tries
from tests.builders.packing_case import make_case
from tests.builders.reporters import a_run

_NO_CHANGE = object()
_GONE = object()


def other(value: Any) -> Any:
    """Another value of the same form."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.99
    if isinstance(value, str):
        return "0" * len(value) if len(value) in (16, 64) else f"{value}x"
    return _NO_CHANGE


def moved(counts: Any) -> Any:
    """The same number of sequences and of tokens, at other lengths."""
    if not isinstance(counts, list) or len(counts) < 5 or not all(type(count) is int for count in counts):
        return _NO_CHANGE
    first = next(length for length, count in enumerate(counts) if count and length >= 1)
    second = next(length for length in range(first + 2, len(counts)) if counts[length])
    changed = list(counts)
    for length, change in ((first, -1), (first + 1, 1), (second, -1), (second - 1, 1)):
        changed[length] += change
    return changed


# The first way that a key can be changed in is always tried.
WAYS: dict[str, Callable[[Any], Any]] = {
    "moved": moved,
    "other": other,
    "half": lambda value: value // 2 if type(value) is int else _NO_CHANGE,
    "zero": lambda value: 0,
    "negative": lambda value: -1,
    "huge": lambda value: 2**70,
    "text": lambda value: "other",
    "null": lambda value: None,
    "emptied": lambda value: type(value)() if isinstance(value, list | dict) else _NO_CHANGE,
    "entry doubled": lambda value: [*value, value[-1]] if isinstance(value, list) and value else _NO_CHANGE,
    "entry dropped": lambda value: value[:-1] if isinstance(value, list) else _NO_CHANGE,
    "key added": lambda value: {**value, "surprise": 1} if isinstance(value, dict) else _NO_CHANGE,
    "key dropped": lambda value: _GONE,
}


class Unprovable(NamedTuple):
    """Changes that are accepted, and why."""

    ways: set[str]
    reason: str


SEED = Unprovable({"other", "half", "zero", "negative", "huge"}, "with any seed the packs are as good")
NAME = Unprovable({"other", "text"}, "a name that nothing is computed from")
MORE = Unprovable({"key added"}, "keys of later versions are ignored")
SETTING = "a setting: with other values too the plan packs every sequence, within its limits"

UNPROVABLE: dict[str, dict[str, Unprovable]] = {
    # The settings of a packed folder, which are stored in it, have its seed and algorithm.
    "records/metadata.json": {"tool_version": NAME},
    "records/settings.json": {"": MORE},
    "records/group-00000.json": {},
    "records/group-00001.json": {},
    "table/metadata.json": {"tool_version": NAME},
    "table/settings.json": {"": MORE},
    "table/group-00000.json": {},
    "table/group-00001.json": {},
    "rows/row_lengths.json": {},
    "rows/settings.json": {"": MORE},
    "rows/metadata.json": {"tool_version": NAME},
    "records/plan.json": {
        "seed": SEED,
        "depth": Unprovable({"other"}, SETTING),
        "shard_multiple": Unprovable({"other", "half"}, SETTING),
        "shard_bytes": Unprovable({"other", "half"}, SETTING),
        "histogram_sha256": Unprovable({"other"}, "the histogram is no input of `write`"),
        "groups[].bound_prices": Unprovable({"moved", "half"}, "with other prices too the bound may be proven"),
        "groups[].bound_prices[]": Unprovable({"other", "half", "zero"}, "with other prices too the bound may be proven"),
        "totals.masked_slots_needed": Unprovable({"other", "half", "zero", "null"}, "the histogram is no input of `write`"),
    },
}


class Change(NamedTuple):
    path: tuple[str | int, ...]
    way: str

    @property
    def key(self) -> str:
        """The path without the numbers of entries: `shards[].packs`."""
        return "".join("[]" if isinstance(part, int) else f".{part}" for part in self.path).lstrip(".")


def changes_of(content: Any, path: tuple[str | int, ...] = ()) -> Iterator[Change]:
    """Every change of every key; of lists the first and the last entry are changed too."""
    if path or isinstance(content, dict):
        for way, change in WAYS.items():
            new = change(content)
            in_list = bool(path) and isinstance(path[-1], int)
            fits = (path or way == "key added") and new is not _NO_CHANGE and not (new is _GONE and in_list)
            if fits and (type(new) is not type(content) or new != content):
                yield Change(path, way)
    if isinstance(content, dict):
        for key, value in content.items():
            yield from changes_of(value, (*path, key))
    elif isinstance(content, list):
        for index in sorted({0, len(content) - 1} if content else set()):
            yield from changes_of(content[index], (*path, index))


def changed(content: Any, change: Change) -> Any:
    if not change.path:
        return WAYS[change.way](content)
    content = copy.deepcopy(content)
    parent = content
    for part in change.path[:-1]:
        parent = parent[part]
    last = change.path[-1]
    new = WAYS[change.way](parent[last])
    if new is _GONE:
        del parent[last]
    else:
        parent[last] = new
    return content


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed TFRecords of two groups, with a vocabulary."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "vocab.txt").write_text("word\n" * 30522)
    make_case(folder, files=4, sequences_per_file=9, max_sequence_length=13, max_predictions=3, shard_multiple=4)
    verify(folder / "records", folder / "packed", a_run())
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
    pack_table(folder / "rows", folder / "packed", settings, a_run(), verified=True)
    return folder


@pytest.fixture(scope="module")
def rows(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in rows of two lengths."""
    from gaudi_bert.tables.pack import pack_table

    folder = tmp_path_factory.mktemp("rows")
    shutil.copytree(table / "rows", folder / "rows")
    settings = TableSettings(max_sequence_length=9, row_lengths=(8, 9), shard_multiple=4, algorithm="nnls")
    pack_table(folder / "rows", folder / "packed", settings, a_run(), verified=True)
    return folder


def chosen(changes: list[Change], seed: str) -> list[Change]:
    """Each key once, and others at random; in the long form all."""
    first = {change.key: change for change in reversed(changes)}
    rest = [change for change in changes if change not in first.values()]
    return [*first.values(), *random.Random(seed).sample(rest, min(len(rest), tries(20, len(rest))))]


def hold_to_the_list(path: Path, file: str, read: Callable[[], object]) -> None:
    """Change a file in each way, one at a time: `read` fails, or the change is listed; and none is listed in vain."""
    before, accepted = path.read_bytes(), set()
    content = json.loads(before)
    tried = chosen(list(changes_of(content)), file)
    try:
        for change in tried:
            path.write_text(json.dumps(changed(content, change)))
            try:
                read()
                accepted.add((change.key, change.way))
            except GaudiBertError as error:
                if re.match(r"/\S+: ", str(error)) is None:
                    pytest.fail(f"{change} is refused without a file's name: {error}")
    finally:
        path.write_bytes(before)
    read()  # as it is
    listed = {(key, way) for key, entry in UNPROVABLE[file].items() for way in entry.ways}
    assert sorted(accepted - listed) == [], f"of {len(tried)} changes are believed"
    if LONG:
        assert sorted(listed - accepted) == [], "listed as unprovable, but refused"


def reading(workdir: Path, file: str, out: Path) -> Callable[[], object]:
    """What reads `file` and believes it or not."""
    records, packed = workdir / "records", workdir / "packed"
    if "plan" in file:
        numbers = itertools.count()
        return lambda: write(records, workdir / "plan.json", out / str(next(numbers)), a_run())
    if file.startswith("records"):
        return lambda: verify(records, packed, a_run())
    from gaudi_bert.tables.verify import verify_table

    return lambda: verify_table(workdir / "rows", packed, a_run())


@pytest.mark.repeated
@pytest.mark.parametrize("file", sorted(UNPROVABLE))
def test_no_key_is_believed(file: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    workdir = request.getfixturevalue(file.partition("/")[0])
    read = reading(workdir, file, tmp_path)
    folders = (workdir, workdir / "packed", workdir / "packed" / NOTES_NAME, workdir / "packed" / "rows-8" / NOTES_NAME)
    hold_to_the_list(next(path for folder in folders if (path := folder / Path(file).name).exists()), file, read)
