"""`verify --shard K/N` and `--finish`: the same proof as that of one process, and nothing less gets through.

What records and tables share is told of both; what only the flow in `gaudi_bert/proof` decides, of records.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gaudi_bert.artefacts.base import manifest_path
from gaudi_bert.artefacts.packed import GroupManifest, Metadata
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import exclusive_lock
from gaudi_bert.config.sections import TableSettings
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.proof.folder import counts_of_groups
from gaudi_bert.tfrecords.verify import verify
from gaudi_bert.tfrecords.wire.framing import frame, read_records
from gaudi_bert.tfrecords.write import write
from tests.builders import tables
from tests.builders.folders import contents
from tests.builders.machines import make_read_only, small_disk
from tests.builders.packing_case import make_case
from tests.builders.reporters import a_run
from tests.builders.shards import mend_sums, notes_of

GROUPS = 5


class Case(NamedTuple):
    """Records or a table, and their packs."""

    source: Path
    packed: Path

    @property
    def is_table(self) -> bool:
        return self.source.suffix == ".parquet"


def make_records(folder: Path, **options: Any) -> Case:
    made = make_case(folder, **{"files": 9, "sequences_per_file": 21, **options})
    return Case(made.records, made.packed)


def make_table_case(folder: Path) -> Case:
    from gaudi_bert.tables.pack import pack_table

    source = folder / "rows.parquet"
    tables.write_parquet(source, tables.random_rows(200, 30, seed=1), row_group_size=10)
    sizes = {"max_sequence_length": 24, "group_sequences": 40, "shard_multiple": 2}
    settings = TableSettings(too_long="split", **sizes)
    pack_table(source, folder / "packed", settings, a_run(), verified=True)
    return Case(source, folder / "packed")


def make_whole(folder: Path, kind: str) -> Case:
    """In five groups, and verified by one process."""
    if kind == "records":
        case = make_records(folder)
        verify_all(case, case.packed)
    else:
        pytest.importorskip("pyarrow", exc_type=ImportError)
        case = make_table_case(folder)
    assert len(list(notes_of(case.packed).glob("group-*.json"))) == GROUPS
    return case


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_whole(tmp_path_factory.mktemp("whole"), "records")


@pytest.fixture(scope="module", params=["records", "table"])
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Packed records, and a packed table."""
    return make_whole(tmp_path_factory.mktemp("each"), request.param)


def unverified(case: Case, folder: Path) -> Path:
    copy = Path(shutil.copytree(case.packed, folder / "packed"))
    for path in [*copy.rglob("verification*"), *copy.rglob(".verification*")]:
        path.unlink()
    return copy


@pytest.fixture
def packed(whole: Case, tmp_path: Path) -> Path:
    """The packs of `whole`, not verified."""
    return unverified(whole, tmp_path)


def verify_all(case: Case, packed: Path, **how: Any) -> StageOutput | GroupsResult:
    if not case.is_table:
        return verify(case.source, packed, a_run(**how))
    from gaudi_bert.tables.verify import verify_table

    return verify_table(case.source, packed, a_run(**how))


def part_or_nothing(case: Case, packed: Path, number: int, parts: int, **how: Any) -> StageOutput | GroupsResult:
    return verify_all(case, packed, part=(number, parts), **how)


def part(case: Case, packed: Path, number: int, parts: int, **how: Any) -> GroupsResult:
    """Verify a part; it is not the complete folder that is there already."""
    result = part_or_nothing(case, packed, number, parts, **how)
    assert isinstance(result, GroupsResult)
    return result


def finish(case: Case, packed: Path) -> StageOutput:
    return verify_all(case, packed, finish=True)


def proof(packed: Path, group: int) -> Path:
    return notes_of(packed) / f"verification-{group:05d}.json"


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_any_number_of_parts_in_any_order_gives_the_proof_of_one_process(
    each: Case, tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gaudi_bert.tfrecords.verify._GROUPS_AT_ONCE", parts)
    packed = unverified(each, tmp_path)
    order = random.Random(parts).sample(range(parts), parts)
    done = [part(each, packed, number, parts, workers=1 + number % 2) for number in order]
    assert [one.groups for one in done] == [len(range(number, GROUPS, parts)) for number in order]
    assert not (notes_of(packed) / "verification.json").exists()
    again = part(each, packed, order[0], parts)
    assert again == GroupsResult(done[0].groups, 0, done[0].sequences, done[0].packs, done[0].tokens)
    finished, plain = finish(each, packed), verify_all(each, each.packed)
    assert plain.skipped
    assert finished.content == plain.content
    assert sum(one.sequences for one in done) == plain.content.sequences
    assert contents(packed) == contents(each.packed), "byte for byte, and no proof of a group is left behind"
    # Whatever runs now has nothing to do.
    for result in (verify_all(each, packed), finish(each, packed), part_or_nothing(each, packed, 0, parts)):
        assert isinstance(result, StageOutput)
        assert result.skipped


def test_a_part_that_waited_while_all_was_finished_has_nothing_to_do(
    whole: Case, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part(whole, packed, 0, 1)

    @contextmanager
    def finished_meanwhile(*given: object, **options: object) -> Iterator[None]:
        monkeypatch.undo()
        finish(whole, packed)
        with exclusive_lock(*given, **options):
            yield

    monkeypatch.setattr("gaudi_bert.proof.parts.exclusive_lock", finished_meanwhile)
    late = part_or_nothing(whole, packed, 1, 2)
    assert isinstance(late, StageOutput)
    assert late.skipped
    assert contents(packed) == contents(whole.packed)


def test_proofs_of_groups_that_a_killed_finish_left_are_removed(whole: Case, packed: Path) -> None:
    part(whole, packed, 0, 1)
    kept = proof(packed, 3).read_bytes()
    finish(whole, packed)
    proof(packed, 3).write_bytes(kept)
    assert finish(whole, packed).skipped
    assert contents(packed) == contents(whole.packed)


def test_what_is_missing_is_named_and_nothing_is_finished(whole: Case, packed: Path) -> None:
    with pytest.raises(FailedError, match=r"5 of 5 groups are not verified: group 0 has no proof, .*, \.\.\.; run "):
        finish(whole, packed)
    for number in (0, 2):
        part(whole, packed, number, 3)
    with pytest.raises(FailedError, match=r"2 of 5 groups are not verified: group 1 has no proof, group 4 has no proof; "):
        finish(whole, packed)
    assert not (packed / "verification.json").exists()
    assert part(whole, packed, 0, 1).groups_written == 2, "proofs do not depend on the number of parts"
    finish(whole, packed)


def test_what_is_no_proof_of_this_group_of_this_folder_is_refused(whole: Case, packed: Path, tmp_path: Path) -> None:
    part(whole, packed, 0, 1)
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    with pytest.raises(FailedError, match=r"5 of 5 groups .*have changed since, or of which these are copies"):
        finish(whole, copy)
    data = proof(packed, 2).read_bytes()
    proof(packed, 2).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"verification-00002.json: not a JSON file .*; remove it and verify this group"):
        finish(whole, packed)
    proof(packed, 2).write_bytes(proof(packed, 0).read_bytes())
    with pytest.raises(FailedError, match=r"1 of 5 groups .*verification-00002.json is that of group 0"):
        finish(whole, packed)
    proof(packed, 2).unlink()
    other = make_records(tmp_path / "other", seed=8)
    part(other, other.packed, 0, 1)
    shutil.copy(proof(other.packed, 1), proof(packed, 1))
    with pytest.raises(FailedError, match=r"2 of 5 groups .*verification-00001.json is of another packed folder"):
        finish(whole, packed)
    assert part(whole, packed, 0, 1).groups_written == 2
    finish(whole, packed)


def test_a_file_that_changed_after_its_part_is_noticed(each: Case, tmp_path: Path) -> None:
    packed = unverified(each, tmp_path)
    case = each if each.is_table else Case(Path(shutil.copytree(each.source, tmp_path / "records")), packed)
    files = [sorted(packed.glob("packed-00003-*"))[0], notes_of(packed) / "group-00003.json"]
    if not case.is_table:
        manifest = GroupManifest.read(manifest_path(packed, 3))
        files += [packed / "group-00003.index", case.source / manifest.inputs[0].name]
    for changed in files:
        for number in range(2):
            part(case, packed, number, 2)
        data = changed.read_bytes()
        changed.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(changed)
        if changed.suffix == ".json":
            changed.write_bytes(data)  # a manifest that cannot be read is another error
        with pytest.raises(FailedError, match=r"1 of 5 groups are not verified: verification-00003.json is of files that"):
            finish(case, packed)
        changed.write_bytes(data)
    part(case, packed, 0, 1)
    finish(case, packed)


def damaged(packed: Path, group: int, change: Callable[[list[bytes]], object]) -> None:
    """Change the packs of the first shard of a group; all sums that are stored agree with it."""
    shard = packed / GroupManifest.read(manifest_path(packed, group)).shards[0].name
    packs = list(read_records(shard))
    change(packs)
    shard.write_bytes(b"".join(map(frame, packs)))
    mend_sums(packed, group)


def test_a_corrupted_pack_is_found_by_its_part_and_by_no_other(each: Case, tmp_path: Path) -> None:
    packed = unverified(each, tmp_path)
    shard = max(packed.glob("packed-00004-*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for number in (0, 2):
        part(each, packed, number, 3)
    with pytest.raises(FailedError, match=rf"{shard.name}.*(damaged|CRC-32C)"):
        part(each, packed, 1, 3)
    with pytest.raises(FailedError, match="group 4 has no proof"):
        finish(each, packed)


def test_shards_of_two_groups_that_are_exchanged(each: Case, tmp_path: Path) -> None:
    """Every sequence is there once, but not where its group has it."""
    packed = unverified(each, tmp_path)
    one, other = (sorted(packed.glob(f"packed-0000{group}-*"))[0] for group in (0, 1))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    for number in range(2):
        with pytest.raises(FailedError, match=r"packed-0000\d"):
            part(each, packed, number, 2)
    with pytest.raises(FailedError, match=r"packed-0000|2 of 5 groups"):
        finish(each, packed)


def test_a_pack_that_is_lost_doubled_or_in_another_group_is_found_by_its_part(whole: Case, packed: Path) -> None:
    """The sums over all groups are equal where a pack moved to another group."""
    moved: list[bytes] = []
    damaged(packed, 0, lambda packs: moved.append(packs.pop(0)))
    damaged(packed, 1, lambda packs: packs.append(moved[0]))
    damaged(packed, 3, lambda packs: packs.append(packs[0]))
    lost, foreign = (
        r"\d+ sequences of the records are missing: part-\d record \d+",
        "are doubled, changed or foreign: packed-0000",
    )
    with pytest.raises(FailedError, match=f"group 0: {lost}"):
        part(whole, packed, 0, 2)
    with pytest.raises(FailedError, match=rf"group 1: \d+ {foreign}.* \(1 more of the groups are wrong\)"):
        part(whole, packed, 1, 2)
    assert [proof(packed, group).exists() for group in range(GROUPS)] == [False, False, True, False, True]
    with pytest.raises(FailedError, match="3 of 5 groups are not verified: group 0 has no proof, group 1 has no proof, "):
        finish(whole, packed)
    with pytest.raises(FailedError, match=f"group 0: {lost}.*2 more of the groups"):
        verify(whole.source, packed, a_run())


def test_no_file_outside_is_changed_through_a_link_in_the_folder(whole: Case, packed: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (
        ".verification.json",
        "..verification.json.seen",
        ".verification.settings.json",
        ".verification-00000.json",
    ):
        (packed / f"{name}.tmp").symlink_to(victim)
    for number in range(2):
        part(whole, packed, number, 2)
    finish(whole, packed)
    assert victim.read_text() == "precious"
    (packed / ".verification.settings.json.lock").unlink()
    (packed / ".verification.settings.json.lock").symlink_to(victim)
    (packed / "verification.json").unlink()
    with pytest.raises(InputError, match="fix the symbolic links"):
        part(whole, packed, 0, 1)
    assert victim.read_text() == "precious"


def test_input_files_that_are_missing_new_or_doubled(whole: Case, packed: Path, tmp_path: Path) -> None:
    records = Path(shutil.copytree(whole.source, tmp_path / "records"))
    (owner,) = (n for n in range(GROUPS) if "part-4" in str(GroupManifest.read(manifest_path(packed, n)).inputs))
    (records / "part-4").rename(tmp_path / "part-4")
    with pytest.raises(FailedError, match=r"1 of \d input files are missing from the records: part-4"):
        verify(records, packed, a_run(part=(owner, GROUPS)))
    (tmp_path / "part-4").rename(records / "part-4")
    shutil.copy(records / "part-4", records / "part-9")
    verify(records, packed, a_run(part=(0, 1)))
    with pytest.raises(FailedError, match="input file part-9 is not among those that were packed"):
        verify(records, packed, a_run(finish=True))
    (records / "part-9").unlink()
    with pytest.raises(FailedError, match=r"5 of 5 groups .*is of another packed folder, or of other records"):
        verify(records, packed, a_run(finish=True))


def test_a_bound_that_only_a_solver_proves(tmp_path: Path) -> None:
    case = make_records(tmp_path, files=6, sequences_per_file=40, max_sequence_length=61, depth=4, algorithm="optimal")
    metadata = Metadata.read(case.packed)
    counts = counts_of_groups(case.packed, metadata)
    assert sum(simple_certificate(each, metadata.depth).bound for each in counts) < metadata.lower_bound
    plain = verify_all(case, case.packed).content
    verified = (case.packed / "verification.json").read_bytes()
    for number in range(2):
        part(case, case.packed, number, 2, overwrite=True)
    assert finish(case, case.packed).content == plain
    assert (case.packed / "verification.json").read_bytes() == verified


def test_overwrite_verifies_again_the_groups_of_the_part_alone(whole: Case, packed: Path) -> None:
    for number in range(2):
        part(whole, packed, number, 2)
    before = {group: proof(packed, group).stat().st_ctime_ns for group in range(GROUPS)}
    assert part(whole, packed, 1, 2, overwrite=True).groups_written == 2
    after = {group: proof(packed, group).stat().st_ctime_ns for group in range(GROUPS)}
    assert {group for group in range(GROUPS) if before[group] != after[group]} == {1, 3}
    finish(whole, packed)
    # Of a folder that is verified, nothing holds any more until all parts are there again.
    part(whole, packed, 0, 2, overwrite=True)
    assert not (packed / "verification.json").exists()
    with pytest.raises(FailedError, match="group 1 has no proof, group 3 has no proof"):
        finish(whole, packed)
    verify(whole.source, packed, a_run())
    assert contents(packed) == contents(whole.packed), "one process removes the proofs of parts"


def test_parts_of_a_folder_that_was_written_again_begin_again(whole: Case, tmp_path: Path) -> None:
    write(whole.source, whole.packed.with_name("plan.json"), tmp_path / "packed", a_run())
    part(whole, tmp_path / "packed", 0, 2)
    shutil.rmtree(tmp_path / "packed")
    write(whole.source, whole.packed.with_name("plan.json"), tmp_path / "packed", a_run(), shards={"shard_multiple": 3})
    part(whole, tmp_path / "packed", 1, 2)
    with pytest.raises(FailedError, match="3 of 5 groups are not verified: group 0 has no proof"):
        finish(whole, tmp_path / "packed")


def test_parts_need_a_folder_that_can_be_written(whole: Case, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        write(whole.source, whole.packed.with_name("plan.json"), disk / "packed", a_run())
        make_read_only(disk)
        with pytest.raises(InputError, match="is read-only, and parts store their proofs there; verify it at once"):
            verify(whole.source, disk / "packed", a_run(part=(0, 2)))


def test_a_group_may_have_fewer_packs_than_shards(tmp_path: Path) -> None:
    case = make_records(tmp_path, files=3, sequences_per_file=5, shard_multiple=13)
    assert (np.array([path.stat().st_size for path in case.packed.glob("*.tfrecord")]) == 0).any()
    plain = verify_all(case, case.packed).content
    for number in range(4):
        part(case, case.packed, number, 4, overwrite=True)
    assert finish(case, case.packed).content == plain
