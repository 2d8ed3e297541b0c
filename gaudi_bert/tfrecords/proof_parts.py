"""The flow of `verify` in parts, for packed TFRecords and packed tables: part K of N proves the groups K, K + N, ...

The proof of a group is a file next to verification.json, `verification-GGGGG.json`, which does not depend on N. It holds
for the files that were read, by their inodes and times, as verification.json does: a proof that was copied with its folder,
or whose files have changed since, counts for nothing. The last step adds the proofs up, writes verification.json and removes
them, so that the folder is as if one process had verified it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn

from gaudi_bert.artefacts.completion import begin_artefact, parts_of, settings_path
from gaudi_bert.artefacts.grouped_output import GroupedOutput
from gaudi_bert.artefacts.packed import GroupVerification, group_verification_path
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.artefacts.store.mirrored_folder import fetch, remove
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import exclusive_lock
from gaudi_bert.tfrecords.packed_proof import Proof, Stored, VerifiedFolder, check_files, identity_of

Take = Callable[[int, dict[str, Any]], None]
"""Gets the number of a group that was proven, and the keys of `GroupVerification` that only its data tell."""
_NAMED = 3


@dataclass(frozen=True)
class _GroupProofs(GroupedOutput[int, GroupVerification]):
    """The proofs of groups; `files_sha256` is that of the files of a group as they are now."""

    files_sha256: Callable[[int], str]

    @property
    def artefact(self) -> Path:
        """The file that is written last."""
        return self.final

    def problem(self, group: int, proof: GroupVerification) -> str | None:
        """Why a stored proof does not hold for this group; None where it does."""
        if proof.signature_sha256 != self.signature.sha256:
            return "is of another packed folder, or of other records"
        if proof.group != group:
            return f"is that of group {proof.group}"
        if proof.files_sha256 != self.files_sha256(group):
            return "is of files that have changed since, or of which these are copies"
        return None

    def _read(self, group: int) -> GroupVerification | None:
        proof = self.summary.read_if_present(self.summary_path(group))
        return None if proof is None or self.problem(group, proof) else proof


@dataclass(frozen=True)
class PartlyVerified(Generic[Stored]):
    """A packed folder whose groups are verified one by one; `files_of` names the files of a group that are read for it."""

    folder: VerifiedFolder[Stored]
    files_of: Callable[[int], Iterable[Path]]

    @property
    def groups(self) -> int:
        """How many groups the folder has."""
        return len(self.folder.metadata.shard_table.group_firsts)

    def prove_shard(
        self, shard: tuple[int, int], prove: Callable[[Sequence[int], Take], None], overwrite: bool
    ) -> StageOutput[Stored] | GroupsResult:
        """Prove the groups K, K + N, ... that have no proof yet, for `shard` (K, N); with `overwrite` all of these.

        `prove` gets their numbers, and calls back with each as soon as it is proven. The result has the totals of these
        groups, or of the complete folder where it was verified already.
        """
        stored = None if overwrite else self.folder.stored()
        if stored is not None:
            return stored
        self._check_writable()
        numbers = range(self.groups)[shard[0] :: shard[1]]
        proofs, out = self._proofs(), self.folder.out
        with exclusive_lock(settings_path(out), str(out), wait=True):
            self.folder.begin(keep_groups=True)
        if overwrite:
            remove(*(path for path in map(proofs.summary_path, numbers) if path.exists()))
        pending = list(numbers) if overwrite else proofs.missing(numbers)
        # Before anything is read: a file that changes while it is read is then noticed.
        files = {number: proofs.files_sha256(number) for number in pending}

        def take(number: int, figures: dict[str, Any]) -> None:
            proof = GroupVerification(
                format_version=1,
                signature_sha256=proofs.signature.sha256,
                files_sha256=files[number],
                group=number,
                **figures,
            )
            proof.write(proofs.summary_path(number))

        prove(pending, take)
        sums = dict.fromkeys(("sequences", "packs", "tokens"), 0)
        for _, proof in proofs.each_whole(numbers):
            for key in sums:
                sums[key] += getattr(proof, key)
        return GroupsResult(len(numbers), len(pending), **sums)

    def finish(self, add_up: Callable[[Iterable[GroupVerification]], Proof[Stored]]) -> StageOutput[Stored]:
        """Write verification.json where every group has its proof; nothing is read but these, manifests and names."""
        stored = self.folder.stored()
        if stored is not None:
            return stored
        self._check_writable()
        _ = self.folder.identity  # before the proofs are held to the files
        proofs, out = self._proofs(), self.folder.out
        proof = add_up(self._all_proofs(proofs))
        check_files(self.folder, proof)
        with exclusive_lock(settings_path(out), str(out), wait=True):
            begin_artefact(out, out, proofs.signature)
            self.folder.store(proof.verification)
            remove(*parts_of(out))
        return StageOutput(proof.verification)

    def _check_writable(self) -> None:
        if not self.folder.is_writable:
            raise InputError(
                f"{self.folder.packed}: is read-only, and parts store their proofs there; verify it at once, without"
                " --shard and --finish"
            )

    def _proofs(self) -> _GroupProofs:
        out = self.folder.out
        return _GroupProofs(
            out.parent,
            out,
            self.folder.signature,
            GroupVerification,
            partial(group_verification_path, out),
            self.folder.reporter,
            lambda group: identity_of(self.files_of(group)),
        )

    def _all_proofs(self, proofs: _GroupProofs) -> Iterator[GroupVerification]:
        """The proofs of all groups, one at a time; what is missing, or does not hold, is an error."""
        missing = set(range(self.groups))
        for group, proof in proofs.each_whole(range(self.groups)):
            missing.discard(group)
            yield proof
        if missing:
            self._refuse(proofs, sorted(missing))

    def _refuse(self, proofs: _GroupProofs, missing: Sequence[int]) -> NoReturn:
        shown = []
        for group in missing[:_NAMED]:
            path = proofs.summary_path(group)
            fetch(path)
            proof = GroupVerification.read_if_present(path)
            problem = proof and proofs.problem(group, proof)
            shown.append(f"{path.name} {problem}" if problem else f"group {group} has no proof")
        more = ", ..." if len(missing) > _NAMED else ""
        raise FailedError(
            f"{self.folder.packed}: {len(missing)} of {self.groups} groups are not verified: {', '.join(shown)}{more}; run"
            " `gaudi-bert verify --shard K/N` for every K and then finish again"
        )
