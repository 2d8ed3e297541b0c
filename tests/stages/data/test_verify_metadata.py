"""`verify` believes nothing that metadata.json and the manifests say: each figure is changed once, and found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.common.errors import FailedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.data.verify import verify
from tests.builders.packing_case import PackingCase, make_case

QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    folder = tmp_path_factory.mktemp("case")
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\nword\n")
    return make_case(folder, files=4, sequences_per_file=30)


def edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def moved(counts: list[int]) -> list[int]:
    """The same number of sequences and of tokens, at other lengths."""
    changed = list(counts)
    first = next(index for index, count in enumerate(counts) if count and index >= 1 and index + 2 < len(counts))
    second = next(index for index in range(first + 2, len(counts)) if counts[index])
    for index, change in ((first, -1), (first + 1, 1), (second, -1), (second - 1, 1)):
        changed[index] += change
    return changed


def metadata(case: PackingCase) -> dict[str, Any]:
    return json.loads((case.packed / "metadata.json").read_text())


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("packs", lambda value: value + 1),
        ("sequences", lambda value: value - 1),
        ("tokens", lambda value: value + 1),
        ("padding_tokens", lambda value: value + 1),
        ("efficiency", lambda value: value * 0.99),
        ("packing_factor", lambda value: value * 1.01),
        ("gap", lambda value: value + 1),
        ("shard_multiple", lambda value: 3),
        ("histogram", moved),
        ("vocabulary", lambda value: {**value, "size": 4}),
        ("vocabulary", lambda value: {**value, "sha256": "0" * 64}),
        ("inputs", lambda value: value[1:]),
        ("shards", lambda value: [value[1], value[0], *value[2:]]),
    ],
)
def test_every_figure_of_the_metadata_is_checked(case: PackingCase, tmp_path: Path, key: str, change: Any) -> None:
    packed = Path(shutil.copytree(case.packed, tmp_path / "packed"))
    edit(packed, "metadata.json", **{key: change(metadata(case)[key])})
    named = {"inputs": "input file part-0 is not among", "shards": "out of order"}.get(key, key)
    with pytest.raises(FailedError, match=named):
        verify(case.records, packed, reporter=QUIET)


def test_a_bound_that_cannot_be_proven_is_refused(case: PackingCase, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(case.packed, tmp_path / "packed"))
    content = metadata(case)
    edit(packed, "metadata.json", lower_bound=content["packs"] + 1, gap=-1)
    with pytest.raises(FailedError, match=r"lower_bound is \d+, only \d+ packs can be proven"):
        verify(case.records, packed, reporter=QUIET)
    edit(packed, "metadata.json", lower_bound=content["lower_bound"] - 1, gap=content["gap"] + 1)
    assert verify(case.records, packed, reporter=QUIET).verification.packs == content["packs"]


@pytest.mark.parametrize(
    ("key", "change", "reason"),
    [
        ("sequences", lambda value: value + 1, "sequences is"),
        ("packs", lambda value: value + 1, "packs is"),
        ("tokens", lambda value: value + 1, "tokens is"),
        ("counts", moved, "histogram of length"),
        ("counts", lambda value: value[:-1], "number of counts"),
        ("group", lambda value: value + 1, "group is"),
        ("shards", lambda value: value[:-1], "shards is"),
        ("plan_sha256", lambda value: "0" * 64, "written by different plans"),
        ("format_version", lambda value: 2, "format_version 2"),
    ],
)
def test_every_figure_of_a_manifest_is_checked(
    case: PackingCase, tmp_path: Path, key: str, change: Any, reason: str
) -> None:
    packed = Path(shutil.copytree(case.packed, tmp_path / "packed"))
    content = json.loads((packed / "group-00001.json").read_text())
    edit(packed, "group-00001.json", **{key: change(content[key])})
    with pytest.raises(FailedError, match=reason):
        verify(case.records, packed, reporter=QUIET)


def test_manifests_are_those_of_the_groups(case: PackingCase, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(case.packed, tmp_path / "packed"))
    shutil.copy(packed / "group-00001.json", packed / "group-00002.json")
    with pytest.raises(FailedError, match=r"group-00002\.json: the manifest of a group that metadata\.json does not have"):
        verify(case.records, packed, reporter=QUIET)
    (packed / "group-00002.json").unlink()
    (packed / "group-00000.json").unlink()
    with pytest.raises(FailedError, match=r"group-00000\.json: cannot read"):
        verify(case.records, packed, reporter=QUIET)
