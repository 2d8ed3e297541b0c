"""`verify --shard K/N` and `--finish`: the same proof as that of one process, and nothing less gets through."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gaudi_bert.artefacts.packed import GroupManifest, Metadata
from gaudi_bert.artefacts.references import manifest_path
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import exclusive_lock
from gaudi_bert.packing.certificate import simple_certificate
from gaudi_bert.proof.folder import counts_of_groups
from gaudi_bert.tfrecords.verify import finish_verification, verify, verify_part
from gaudi_bert.tfrecords.wire.framing import frame, read_records
from gaudi_bert.tfrecords.write import write
from tests.builders.folders import contents
from tests.builders.machines import make_read_only, small_disk
from tests.builders.packing_case import PackingCase, make_case
from tests.builders.reporters import QUIET
from tests.builders.shards import mend_sums

GROUPS = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> PackingCase:
    """Nine files in five groups, verified by one process."""
    case = make_case(tmp_path_factory.mktemp("whole"), files=9, sequences_per_file=21)
    verify(case.records, case.packed, reporter=QUIET)
    assert len(list(case.packed.glob("group-*.json"))) == GROUPS
    return case


@pytest.fixture
def packed(whole: PackingCase, tmp_path: Path) -> Path:
    """The packs of `whole`, not verified."""
    copy = Path(shutil.copytree(whole.packed, tmp_path / "packed"))
    for path in [*copy.glob("verification*"), *copy.glob(".verification*")]:
        path.unlink()
    return copy


def part(case: PackingCase, packed: Path, number: int, parts: int, **options: object) -> GroupsResult:
    """Verify a part; it is not the complete folder that is there already."""
    result = verify_part(case.records, packed, (number, parts), reporter=QUIET, **options)
    assert isinstance(result, GroupsResult)
    return result


def finish(case: PackingCase, packed: Path) -> StageOutput:
    return finish_verification(case.records, packed, reporter=QUIET)


def proof(packed: Path, group: int) -> Path:
    return packed / f"verification-{group:05d}.json"


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_any_number_of_parts_in_any_order_gives_the_proof_of_one_process(
    whole: PackingCase, packed: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gaudi_bert.tfrecords.verify._GROUPS_AT_ONCE", parts)
    order = random.Random(parts).sample(range(parts), parts)
    done = [part(whole, packed, number, parts, workers=1 + number % 2) for number in order]
    assert [each.groups for each in done] == [len(range(number, GROUPS, parts)) for number in order]
    assert sum(each.sequences for each in done) == len(whole.sequences)
    assert not (packed / "verification.json").exists()
    again = part(whole, packed, order[0], parts)
    assert again == GroupsResult(done[0].groups, 0, done[0].sequences, done[0].packs, done[0].tokens)
    finished = finish(whole, packed)
    assert finished.content == verify(whole.records, whole.packed, reporter=QUIET).content
    assert contents(packed) == contents(whole.packed), "byte for byte, and no proof of a group is left behind"
    # Whatever runs now has nothing to do.
    assert verify(whole.records, packed, reporter=QUIET).skipped
    assert finish(whole, packed).skipped
    skipped = verify_part(whole.records, packed, (0, parts), reporter=QUIET)
    assert isinstance(skipped, StageOutput)
    assert skipped.skipped


def test_a_part_that_waited_while_all_was_finished_has_nothing_to_do(
    whole: PackingCase, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part(whole, packed, 0, 1)

    @contextmanager
    def finished_meanwhile(*given: object, **options: object) -> Iterator[None]:
        monkeypatch.undo()
        finish(whole, packed)
        with exclusive_lock(*given, **options):
            yield

    monkeypatch.setattr("gaudi_bert.proof.parts.exclusive_lock", finished_meanwhile)
    late = verify_part(whole.records, packed, (1, 2), reporter=QUIET)
    assert isinstance(late, StageOutput)
    assert late.skipped
    assert contents(packed) == contents(whole.packed)


def test_proofs_of_groups_that_a_killed_finish_left_are_removed(whole: PackingCase, packed: Path) -> None:
    part(whole, packed, 0, 1)
    kept = proof(packed, 3).read_bytes()
    finish(whole, packed)
    proof(packed, 3).write_bytes(kept)
    assert finish(whole, packed).skipped
    assert contents(packed) == contents(whole.packed)


def test_what_is_missing_is_named_and_nothing_is_finished(whole: PackingCase, packed: Path) -> None:
    with pytest.raises(FailedError, match=r"5 of 5 groups are not verified: group 0 has no proof, .*, \.\.\.; run "):
        finish(whole, packed)
    for number in (0, 2):
        part(whole, packed, number, 3)
    with pytest.raises(FailedError, match=r"2 of 5 groups are not verified: group 1 has no proof, group 4 has no proof; "):
        finish(whole, packed)
    assert not (packed / "verification.json").exists()
    assert part(whole, packed, 0, 1).groups_written == 2, "proofs do not depend on the number of parts"
    finish(whole, packed)


def test_a_damaged_proof_is_refused(whole: PackingCase, packed: Path) -> None:
    part(whole, packed, 0, 1)
    data = proof(packed, 2).read_bytes()
    proof(packed, 2).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"verification-00002.json: not a JSON file .*; remove it and verify this group"):
        finish(whole, packed)
    proof(packed, 2).unlink()
    assert part(whole, packed, 0, 1).groups_written == 1
    finish(whole, packed)


def test_an_edited_proof_is_not_believed(whole: PackingCase, packed: Path) -> None:
    part(whole, packed, 0, 1)
    written = json.loads(proof(packed, 2).read_text())
    for key in written:
        value = written[key]
        digits = value[:-1] + ("0" if value[-1] != "0" else "1") if isinstance(value, str) else value + 1
        proof(packed, 2).write_text(json.dumps({**written, key: digits}))
        with pytest.raises((InputError, FailedError), match=r"verification-00002\.json"):
            finish(whole, packed)
        assert not (packed / "verification.json").exists()
    proof(packed, 2).write_text(json.dumps(written))
    finish(whole, packed)


def test_proofs_of_another_folder_are_refused(whole: PackingCase, packed: Path, tmp_path: Path) -> None:
    other = make_case(tmp_path / "other", files=9, sequences_per_file=21, seed=8)
    part(other, other.packed, 0, 1)
    part(whole, packed, 0, 2)
    for group in (1, 3):
        shutil.copy(proof(other.packed, group), proof(packed, group))
    with pytest.raises(FailedError, match=r"2 of 5 groups .*verification-00001.json is of another packed folder"):
        finish(whole, packed)
    assert part(whole, packed, 1, 2).groups_written == 2
    finish(whole, packed)


def test_proofs_of_another_group_or_of_a_copy_are_refused(whole: PackingCase, packed: Path, tmp_path: Path) -> None:
    part(whole, packed, 0, 1)
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    with pytest.raises(FailedError, match=r"5 of 5 groups .*have changed since, or of which these are copies"):
        finish(whole, copy)
    shutil.copy(proof(packed, 0), proof(packed, 1))
    with pytest.raises(FailedError, match=r"1 of 5 groups .*verification-00001.json is that of group 0"):
        finish(whole, packed)


@pytest.mark.parametrize("side", ["shard", "manifest", "index", "input"])
def test_a_file_that_changed_after_its_part_is_noticed(whole: PackingCase, packed: Path, tmp_path: Path, side: str) -> None:
    records = Path(shutil.copytree(whole.records, tmp_path / "records"))
    for number in range(2):
        verify_part(records, packed, (number, 2), reporter=QUIET)
    manifest = GroupManifest.read(manifest_path(packed, 3))
    changed = {
        "shard": packed / manifest.shards[0].name,
        "manifest": manifest_path(packed, 3),
        "index": packed / "group-00003.index",
        "input": records / manifest.inputs[0].name,
    }[side]
    data = changed.read_bytes()
    changed.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(changed)
    if side == "manifest":
        changed.write_bytes(data)  # a manifest that cannot be read is another error
    with pytest.raises(FailedError, match=r"1 of 5 groups are not verified: verification-00003.json is of files that have"):
        finish_verification(records, packed, reporter=QUIET)


def damaged(packed: Path, group: int, change: Callable[[list[bytes]], object]) -> None:
    """Change the packs of the first shard of a group; all sums that are stored agree with it."""
    shard = packed / GroupManifest.read(manifest_path(packed, group)).shards[0].name
    packs = list(read_records(shard))
    change(packs)
    shard.write_bytes(b"".join(map(frame, packs)))
    mend_sums(packed, group)


def test_a_corrupted_pack_is_found_by_its_part_and_by_no_other(whole: PackingCase, packed: Path) -> None:
    shard = packed / GroupManifest.read(manifest_path(packed, 4)).shards[1].name
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for number in (0, 2):
        part(whole, packed, number, 3)
    with pytest.raises(FailedError, match=rf"{shard.name}.* damaged"):
        part(whole, packed, 1, 3)
    with pytest.raises(FailedError, match="group 4 has no proof"):
        finish(whole, packed)


def test_a_pack_that_is_lost_doubled_or_in_another_group_is_found_by_its_part(whole: PackingCase, packed: Path) -> None:
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
        verify(whole.records, packed, reporter=QUIET)


def test_no_file_outside_is_changed_through_a_link_in_the_folder(whole: PackingCase, packed: Path, tmp_path: Path) -> None:
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


def test_input_files_that_are_missing_new_or_doubled(whole: PackingCase, packed: Path, tmp_path: Path) -> None:
    records = Path(shutil.copytree(whole.records, tmp_path / "records"))
    (owner,) = (n for n in range(GROUPS) if "part-4" in str(GroupManifest.read(manifest_path(packed, n)).inputs))
    (records / "part-4").rename(tmp_path / "part-4")
    with pytest.raises(FailedError, match=r"1 of \d input files are missing from the records: part-4"):
        verify_part(records, packed, (owner, GROUPS), reporter=QUIET)
    (tmp_path / "part-4").rename(records / "part-4")
    shutil.copy(records / "part-4", records / "part-9")
    verify_part(records, packed, (0, 1), reporter=QUIET)
    with pytest.raises(FailedError, match="input file part-9 is not among those that were packed"):
        finish_verification(records, packed, reporter=QUIET)
    (records / "part-9").unlink()
    with pytest.raises(FailedError, match=r"5 of 5 groups .*is of another packed folder, or of other records"):
        finish_verification(records, packed, reporter=QUIET)


def test_a_false_key_of_the_metadata_is_found(whole: PackingCase, packed: Path) -> None:
    content = json.loads((packed / "metadata.json").read_text())
    (packed / "metadata.json").write_text(json.dumps({**content, "gap": 77}))
    part(whole, packed, 0, 1)
    with pytest.raises(FailedError, match=r"metadata\.json: gap: "):
        finish(whole, packed)
    assert not (packed / "verification.json").exists()


def test_a_bound_that_only_a_solver_proves(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=6, sequences_per_file=40, max_sequence_length=61, depth=4, algorithm="optimal")
    metadata = Metadata.read(case.packed)
    counts = counts_of_groups(case.packed, metadata)
    assert sum(simple_certificate(each, metadata.depth).bound for each in counts) < metadata.lower_bound
    plain = verify(case.records, case.packed, reporter=QUIET).content
    verified = (case.packed / "verification.json").read_bytes()
    for number in range(2):
        part(case, case.packed, number, 2, overwrite=True)
    assert finish(case, case.packed).content == plain
    assert (case.packed / "verification.json").read_bytes() == verified


def test_overwrite_verifies_again_the_groups_of_the_part_alone(whole: PackingCase, packed: Path) -> None:
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
    verify(whole.records, packed, reporter=QUIET)
    assert contents(packed) == contents(whole.packed), "one process removes the proofs of parts"


def test_parts_of_a_folder_that_was_written_again_begin_again(whole: PackingCase, tmp_path: Path) -> None:
    write(whole.records, whole.plan, tmp_path / "packed", reporter=QUIET)
    part(whole, tmp_path / "packed", 0, 2)
    shutil.rmtree(tmp_path / "packed")
    write(whole.records, whole.plan, tmp_path / "packed", reporter=QUIET, shards={"shard_multiple": 3})
    part(whole, tmp_path / "packed", 1, 2)
    with pytest.raises(FailedError, match="3 of 5 groups are not verified: group 0 has no proof"):
        finish(whole, tmp_path / "packed")


def test_parts_need_a_folder_that_can_be_written(whole: PackingCase, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        write(whole.records, whole.plan, disk / "packed", reporter=QUIET)
        make_read_only(disk)
        with pytest.raises(InputError, match="is read-only, and parts store their proofs there; verify it at once"):
            verify_part(whole.records, disk / "packed", (0, 2), reporter=QUIET)


def test_a_group_may_have_fewer_packs_than_shards(tmp_path: Path) -> None:
    case = make_case(tmp_path, files=3, sequences_per_file=5, shard_multiple=13)
    assert (np.array([path.stat().st_size for path in case.packed.glob("*.tfrecord")]) == 0).any()
    plain = verify(case.records, case.packed, reporter=QUIET).content
    for number in range(4):
        part(case, case.packed, number, 4, overwrite=True)
    assert finish(case, case.packed).content == plain
