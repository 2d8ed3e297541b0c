"""When a stage has nothing to do, resumes, or refuses."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from gaudi_bert.artefacts.base import Artefact
from gaudi_bert.artefacts.completion import (
    GroupedOutput,
    Signature,
    begin_artefact_unless_finished,
    is_artefact_finished,
    remove_artefact,
    settings_path,
)
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.files import exclusive_lock
from tests.builders.reporters import QUIET

OLD = Signature("write", {"depth": 3, "seed": 1}, {"histogram": "abc"})
NEW = Signature("write", {"depth": 4, "seed": 1}, {"histogram": "abc"})


def test_a_finished_file_of_the_same_settings_is_unchanged(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert not begin_artefact_unless_finished(plan, plan, OLD)
    assert not begin_artefact_unless_finished(plan, plan, OLD), "begun but not finished: there is still work to do"
    assert not is_artefact_finished(plan, plan, OLD)
    plan.write_text("{}")
    assert begin_artefact_unless_finished(plan, plan, OLD)
    assert [is_artefact_finished(plan, plan, signature) for signature in (OLD, NEW)] == [True, False]
    assert settings_path(plan) == tmp_path / "plan.settings.json"


def test_other_settings_are_refused_by_name_until_told_to_overwrite(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    begin_artefact_unless_finished(plan, plan, OLD)
    plan.write_text("{}")
    with pytest.raises(
        InputError, match=r"plan.json: the output was .* other settings \(settings.depth: 3 in the file, 4 now\)"
    ):
        begin_artefact_unless_finished(plan, plan, NEW)
    assert plan.exists()
    assert not begin_artefact_unless_finished(plan, plan, NEW, overwrite=True)
    assert not plan.exists()


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """The file that a stage writes last to the folder `packed`."""
    return tmp_path / "packed" / "metadata.json"


def test_a_folder_half_done_is_resumed_only_with_its_own_settings(final: Path) -> None:
    folder = final.parent
    begin_artefact_unless_finished(folder, final, OLD)
    (folder / "packed-00000-00000.tfrecord").write_text("x")
    assert not begin_artefact_unless_finished(folder, final, OLD)
    assert (folder / "packed-00000-00000.tfrecord").exists()
    with pytest.raises(InputError, match="depth: 3 in the file"):
        begin_artefact_unless_finished(folder, final, NEW)
    begin_artefact_unless_finished(folder, final, NEW, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["settings.json"]


def test_a_removal_that_is_killed_leaves_nothing_that_looks_finished(final: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final file goes first, and the settings last: whatever remains is refused, or resumed."""
    folder, removed = final.parent, []
    begin_artefact_unless_finished(folder, final, OLD)
    for name in ("group-00000.json", "metadata.json", "packed-00000-00000.tfrecord"):
        (folder / name).write_text("{}")
    monkeypatch.setattr("gaudi_bert.artefacts.completion.remove_files", lambda *paths: removed.extend(p.name for p in paths))
    remove_artefact(folder, final, OLD.stage)
    assert (removed[0], removed[-1], len(removed)) == ("metadata.json", "settings.json", 4)


def test_what_is_not_ours_is_never_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(
        InputError,
        match=r"mine: already contains thesis.tex, and no settings file shows that .* wrote this folder",
    ):
        begin_artefact_unless_finished(folder, folder / "metadata.json", OLD)
    assert (folder / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("stored", "requested", "message"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "b: missing in the file, 2 now"),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b[1]: 2 in the file, 3 now"),
        ({"a": [1]}, {"a": [1, 2]}, "a: [1] in the file, [1, 2] now"),
    ],
)
def test_the_first_difference_is_named(
    final: Path, stored: dict[str, object], requested: dict[str, object], message: str
) -> None:
    begin_artefact_unless_finished(final.parent, final, Signature("write", stored, {}))
    final.write_text("x")
    assert begin_artefact_unless_finished(final.parent, final, Signature("write", stored, {}))
    with pytest.raises(InputError, match=re.escape(f"(settings.{message})")):
        begin_artefact_unless_finished(final.parent, final, Signature("write", requested, {}))


def test_a_folder_with_an_ending_takes_nothing_beside_it_for_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "packed.v1"
    (tmp_path / "thesis.tex").write_text("years of work")
    assert not begin_artefact_unless_finished(folder, folder / "metadata.json", OLD)
    (folder / "metadata.json").write_text("{}")
    assert not begin_artefact_unless_finished(folder, folder / "metadata.json", NEW, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["settings.json"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert settings_path(folder) == settings_path(folder, folder / "metadata.json") == folder / "settings.json"


def test_writers_that_begin_one_folder_together_wait_for_one_another(final: Path) -> None:
    folder = final.parent
    output = GroupedOutput[int, Artefact](folder, final, OLD, Artefact, lambda number: folder / f"{number}.json", QUIET)
    with ThreadPoolExecutor(1) as pool:
        with exclusive_lock(settings_path(folder, final), "the other writer"):
            second = pool.submit(output.begin_unless_finished, False)
            assert not wait([second], 0.5).done
        assert second.result(20) is False, "there is work to do"
