"""`verify` of packs of any kind: a part, all parts, or all at once give one proof, and nothing less gets through."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gaudi_bert.artefacts.base import part_path
from gaudi_bert.artefacts.packed import RecordManifest, RecordMetadata, Verification
from gaudi_bert.artefacts.results import PlainResult, StageOutput
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.packing.certificate import prove_bound_by_totals
from gaudi_bert.packs.verify import PackedFolder
from gaudi_bert.tfrecords.verify import verify_records
from tests.builders import tables
from tests.builders.folders import contents
from tests.builders.machines import make_read_only, small_disk
from tests.builders.packing_case import make_case
from tests.builders.reporters import a_run
from tests.builders.shards import notes_of

GROUPS = 5


class Case(NamedTuple):
    """Records or a table, and their packs."""

    source: Path
    packed: Path


def make_records(folder: Path, **options: Any) -> Case:
    made = make_case(folder, **{"files": 9, "sequences_per_file": 21, **options})
    return Case(made.records, made.packed)


def make_table(folder: Path) -> Case:
    pytest.importorskip("pyarrow", exc_type=ImportError)
    from gaudi_bert.tables.pack import pack_table

    source = folder / "rows.parquet"
    tables.write_parquet(source, tables.random_rows(200, 30, seed=1), row_group_size=10)
    sizes = {"max_sequence_length": 24, "group_sequences": 40, "shard_multiple": 2}
    pack_table(source, folder / "packed", TableSettings(too_long="split", **sizes), a_run())
    return Case(source, folder / "packed")


@pytest.fixture(scope="module", params=[make_records, make_table], ids=["records", "table"])
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    case = request.param(tmp_path_factory.mktemp("each"))
    verify_case(case, case.packed)
    assert len(list(notes_of(case.packed).glob("group-*.json"))) == GROUPS
    return case


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_records(tmp_path_factory.mktemp("records"))


def copied(case: Case, folder: Path) -> Path:
    """The packs, as if nobody had verified them."""
    packed = Path(shutil.copytree(case.packed, folder / "packed"))
    (notes_of(packed) / "verification.json").unlink(missing_ok=True)
    return packed


def verify_case(case: Case, packed: Path, **how: Any) -> StageOutput | PlainResult:
    if case.source.suffix != ".parquet":
        return verify_records(case.source, packed, a_run(**how))
    from gaudi_bert.tables.verify import verify_table

    return verify_table(case.source, packed, a_run(**how))


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_any_number_of_parts_in_any_order_gives_the_proof_of_one_process(
    each: Case, tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gaudi_bert.tfrecords.verify._GROUPS_AT_ONCE", parts)
    packed = copied(each, tmp_path)
    order = random.Random(parts).sample(range(parts), parts)
    done = [verify_case(each, packed, part=(number, parts), workers=1 + number % 2) for number in order]
    assert [one.facts["groups"] for one in done] == [len(range(number, GROUPS, parts)) for number in order]
    assert not (notes_of(packed) / "verification.json").exists()
    finished, plain = verify_case(each, packed, finish=True), verify_case(each, each.packed)
    assert finished.content == plain.content
    assert sum(one.facts["sequences"] for one in done) == plain.content.sequences
    assert contents(packed) == contents(each.packed), "byte for byte, and no file of a part is left behind"
    assert verify_case(each, packed, finish=True).content == plain.content, "a finish that was killed may come again"


def test_parts_that_are_missing_or_of_other_packs_finish_nothing(records: Case, tmp_path: Path) -> None:
    packed = copied(records, tmp_path)
    with pytest.raises(FailedError, match="not verified"):
        verify_records(records.source, packed, a_run(finish=True))
    verify_records(records.source, packed, a_run(part=(0, 2)))
    with pytest.raises(FailedError, match="not verified"):
        verify_records(records.source, packed, a_run(finish=True))
    other = make_records(tmp_path / "other", seed=8)
    verify_records(other.source, other.packed, a_run(part=(1, 2)))
    shutil.copy(part_path(other.packed / "verification.json", (1, 2)), packed)
    with pytest.raises(FailedError, match=r"verification-00001-of-00002\.json"):
        verify_records(records.source, packed, a_run(finish=True))
    assert not (packed / "verification.json").exists()


def test_a_verification_of_other_packs_is_refused(records: Case, tmp_path: Path) -> None:
    proof = verify_records(records.source, records.packed, a_run()).content
    proof.model_copy(update={"packs_sha256": "0" * 64}).write(tmp_path)
    with pytest.raises(InputError, match="verifies packs that differ from those in metadata"):
        Verification.read_matching(tmp_path, RecordMetadata.read(records.packed))


def test_a_bound_that_only_a_solver_proves(tmp_path: Path) -> None:
    case = make_records(tmp_path, files=6, sequences_per_file=40, max_sequence_length=61, depth=4, algorithm="optimal")
    folder = PackedFolder(case.packed, RecordMetadata.read(case.packed), RecordManifest)
    counts = [np.array(manifest.counts) for manifest in folder.read_manifests()]
    simple = sum(prove_bound_by_totals(each, folder.metadata.depth).bound for each in counts)
    assert simple < folder.metadata.lower_bound == verify_records(case.source, case.packed, a_run()).content.lower_bound


def test_a_read_only_folder_is_verified_at_once_and_not_in_parts(records: Case, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        packed = Path(shutil.copytree(records.packed, disk / "packed"))
        make_read_only(disk)
        assert verify_records(records.source, packed, a_run()).content.sequences == 9 * 21
        with pytest.raises(InputError, match="is read-only"):
            verify_records(records.source, packed, a_run(part=(0, 2)))


def test_a_group_may_have_fewer_packs_than_shards(tmp_path: Path) -> None:
    case = make_records(tmp_path, files=3, sequences_per_file=5, shard_multiple=13)
    assert (np.array([path.stat().st_size for path in case.packed.glob("*.tfrecord")]) == 0).any()
    for number in range(4):
        verify_records(case.source, case.packed, a_run(part=(number, 4)))
    finished = verify_records(case.source, case.packed, a_run(finish=True)).content
    assert finished == verify_records(case.source, case.packed, a_run()).content
