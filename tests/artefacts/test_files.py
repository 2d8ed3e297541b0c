"""Every stored file reads back as what was written, byte for byte, and is read strictly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.base import Artefact, manifest_path
from gaudi_bert.artefacts.completion import Signature, begin_artefact, is_finished, remove_artefact, settings_path
from gaudi_bert.artefacts.histogram import HistogramFile
from gaudi_bert.artefacts.pack_kinds import pack_kind
from gaudi_bert.artefacts.packed import GroupManifest, Metadata, TableMetadata, Verification
from gaudi_bert.artefacts.plan import Plan, WritablePlan
from gaudi_bert.artefacts.shards import index_path, read_starts, write_index
from gaudi_bert.artefacts.training import EvaluationResult, TrainingResult
from gaudi_bert.common.crc32c import crc32c
from gaudi_bert.common.errors import InputError
from gaudi_bert.tfrecords.verify import verify
from tests.builders.command_line import foreign_prose
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.reporters import a_run

EVALUATION = {
    "loss": 5.25, "masked_lm_loss": 4.5, "masked_lm_accuracy": 0.25, "next_sentence_loss": 0.75,
    "next_sentence_accuracy": 0.5, "unigram_baseline": 0.125, "sequences": 7, "masked_tokens": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    case = make_case(tmp_path_factory.mktemp("case"), files=3)
    verify(case.records, case.packed, a_run())
    return case


def test_what_the_stages_write_is_written_again_byte_for_byte(case: PackingCase, tmp_path: Path) -> None:
    Metadata.read(case.packed).write(tmp_path)
    assert (tmp_path / "metadata.json").read_bytes() == (case.packed / "metadata.json").read_bytes()
    files = {
        case.plan.with_name("histogram.json"): HistogramFile,
        case.plan: Plan,
        manifest_path(case.packed, 1): GroupManifest,
        case.packed / "verification.json": Verification,
    }
    for original, kind in files.items():
        kind.read(original).write(tmp_path / original.name)
        assert (tmp_path / original.name).read_bytes() == original.read_bytes(), original.name


WRONG = (None, True, -1, 0.5, 2**70, "x y", [], [1], [{"a": 1}], {}, {"a": 1}, 1e400)


@pytest.mark.parametrize("name", ["histogram.json", "plan.json", "packed/metadata.json", "packed/verification.json"])
def test_wrong_values_of_every_key_are_refused_in_plain_words(case: PackingCase, tmp_path: Path, name: str) -> None:
    kind = {"histogram": HistogramFile, "plan": Plan, "metadata": Metadata, "verification": Verification}[Path(name).stem]
    content = json.loads((case.plan.parent / name).read_text(encoding="utf-8"))
    file = tmp_path / Path(name).name
    for key in (*content, "unknown"):
        for wrong in WRONG:
            file.write_text(json.dumps({**content, key: wrong}))
            try:
                kind.read(file)
            except InputError as error:
                message = str(error)
                assert message.startswith(f"{file}: ")
                assert foreign_prose(message) is None, message


def test_a_plan_is_known_by_all_that_it_says(case: PackingCase) -> None:
    plan = WritablePlan.read(case.plan)
    assert plan.sha256 == Plan.read(case.plan).sha256 == GroupManifest.read(manifest_path(case.packed, 0)).source_sha256
    assert sum(plan.mixture.values()) == plan.totals.packs


def test_results_of_training_leave_out_what_was_not_measured(tmp_path: Path) -> None:
    training = {
        "updates": 3, "sequences": 30, "tokens": 300, "processes": 1, "packing_factor": 2.0, "sequences_per_update": 10.0,
        "reached_target": False, "training": None, "evaluation": EVALUATION,
    }  # fmt: skip
    evaluation = {"update": 3, "loss_per": "token", **EVALUATION, "unpacked": EVALUATION, "largest_difference": 1e-7}
    for name, value, model in (("t.json", training, TrainingResult), ("e.json", evaluation, EvaluationResult)):
        text = json.dumps(value, indent=1) + "\n"
        (tmp_path / name).write_text(text)
        model.read(tmp_path / name).write(tmp_path / name)
        assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a JSON file"),
        (b"\xff", "not a JSON file"),
        (b"[" * 100_000, "recursion limit"),
        (b'{"sequences": ' + b"9" * 6_000 + b"}", "not a JSON file"),
        (b'{"sequences": "' + b"9" * 3_000_000 + b'"}', "`sequences` = '99"),
        (b'{"sequences": true}', "`sequences` = True"),
        (b'{"sequences": 3.0}', "`sequences` = 3.0"),
        (b'{"sequences": NaN}', "`sequences` = nan"),
        (b'{"fingerprint": "\\ud800"}', "not a JSON file"),
        (b"[]", "`its content` = "),
    ],
)
def test_whatever_a_file_holds_is_one_short_line(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=reason) as caught:
        Verification.read(tmp_path / "a.json")
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Plan, WritablePlan, Metadata, GroupManifest, TableMetadata])
def test_another_version_of_a_format_is_refused_with_the_remedy(tmp_path: Path, kind: type[Artefact]) -> None:
    path = tmp_path / "x.json"
    of_table = {"format": "table"} if kind is TableMetadata else {}
    path.write_text(json.dumps({"groups": [], "shards": [], **of_table, "format_version": 1}))
    with pytest.raises(InputError) as refused:
        kind.read(path)
    assert str(refused.value) == f"{path}: format_version 1, this version reads 2; {kind.remedy}"


# --- where a shard's records begin, or nothing where the sizes do not tell it


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = index_path(tmp_path, 7)
    crc = write_index(path, [np.array([20, 30], np.uint32), np.array([], np.uint32), np.array([40, 50, 60], np.uint32)])
    assert crc == crc32c(path.read_bytes())
    return path


def test_the_records_of_a_shard_begin_where_its_sizes_say(index: Path) -> None:
    assert index.name == "group-00007.index"
    assert read_starts(index, 0, 2, 50).tolist() == [0, 20, 50]
    assert read_starts(index, 2, 0, 0).tolist() == [0]
    assert read_starts(index, 2, 3, 150).tolist() == [0, 40, 90, 150]


def test_what_does_not_belong_to_the_shard_is_not_believed(index: Path) -> None:
    assert read_starts(index, 0, 2, 51) is None  # other bytes
    assert read_starts(index, 3, 3, 150) is None  # too few sizes
    assert read_starts(index.with_name("group-00008.index"), 0, 2, 50) is None


# --- when a stage has nothing to do, resumes, or refuses


OLD = Signature("plan", {"depth": 3, "seed": 1}, {"histogram": "abc"})
NEW = Signature("plan", {"depth": 4, "seed": 1}, {"histogram": "abc"})


def test_a_finished_file_of_the_same_settings_is_unchanged(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert not begin_artefact(plan, plan, OLD)
    assert not begin_artefact(plan, plan, OLD), "begun but not finished: there is still work to do"
    assert not is_finished(plan, plan, OLD)
    plan.write_text("{}")
    assert begin_artefact(plan, plan, OLD)
    assert [is_finished(plan, plan, signature) for signature in (OLD, NEW)] == [True, False]
    assert settings_path(plan) == tmp_path / "plan.settings.json"


def test_other_settings_are_refused_by_name_until_told_to_overwrite(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    begin_artefact(plan, plan, OLD)
    plan.write_text("{}")
    with pytest.raises(InputError, match=r"plan.json was written with --depth 3, not --depth 4: .*--overwrite"):
        begin_artefact(plan, plan, NEW)
    assert plan.exists()
    assert not begin_artefact(plan, plan, NEW, overwrite=True)
    assert not plan.exists()


def test_a_folder_half_done_is_resumed_only_with_its_own_settings(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    final = folder / "metadata.json"
    begin_artefact(folder, final, OLD)
    (folder / "packed-00000-00000.tfrecord").write_text("x")
    assert not begin_artefact(folder, final, OLD)
    assert (folder / "packed-00000-00000.tfrecord").exists()
    with pytest.raises(InputError, match="was written with --depth"):
        begin_artefact(folder, final, NEW)
    begin_artefact(folder, final, NEW, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["settings.json"]


def test_a_removal_that_is_killed_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final file goes first, and the settings last: whatever remains is refused, or resumed."""
    folder, removed = tmp_path / "packed", []
    final = folder / "metadata.json"
    begin_artefact(folder, final, OLD)
    for name in ("a", "metadata.json", "z"):
        (folder / name).write_text("{}")
    monkeypatch.setattr("gaudi_bert.artefacts.completion.remove", lambda *paths: removed.extend(p.name for p in paths))
    remove_artefact(folder, final)
    assert (removed[0], removed[-1], len(removed)) == ("metadata.json", "settings.json", 4)


def test_what_is_not_ours_is_never_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="does not describe it"):
        begin_artefact(folder, folder / "metadata.json", OLD)
    assert (folder / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("stored", "requested", "message"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "b = nothing, not b = 2"),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "a.b[1] = 2, not a.b[1] = 3"),
        ({"a": [1]}, {"a": [1, 2]}, "a = [1], not a = [1, 2]"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path, stored: dict[str, object], requested: dict[str, object], message: str
) -> None:
    final = tmp_path / "made" / "last"
    begin_artefact(final.parent, final, Signature("stage", stored, {}))
    final.write_text("x")
    assert begin_artefact(final.parent, final, Signature("stage", stored, {}))
    with pytest.raises(InputError, match=re.escape(f"was written with {message}:")):
        begin_artefact(final.parent, final, Signature("stage", requested, {}))


def test_a_folder_with_an_ending_takes_nothing_beside_it_for_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "packed.v1"
    (tmp_path / "thesis.tex").write_text("years of work")
    assert not begin_artefact(folder, folder / "metadata.json", OLD)
    (folder / "metadata.json").write_text("{}")
    assert not begin_artefact(folder, folder / "metadata.json", NEW, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["settings.json"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert settings_path(folder) == settings_path(folder, folder / "metadata.json") == folder / "settings.json"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["folder/metadata.json"], "records"),
        (["folder/__gaudi_bert__/metadata.json"], "table"),
        (["folder/metadata.json", "folder/__gaudi_bert__/metadata.json"], "table"),
        (["folder/packed-00000.parquet", "folder/other.json"], None),
        (["folder/examples.tfrecord", "folder/settings.json"], None),  # the user's own settings
        ([], None),
    ],
)
def test_what_packs_a_folder_holds_is_decided_by_its_metadata(tmp_path: Path, files: list[str], kind: str | None) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert pack_kind(tmp_path / "folder") == kind
