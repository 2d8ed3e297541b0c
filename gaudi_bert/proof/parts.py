"""The same proof in parts: part K of N proves the groups K, K + N, ...

The proof of a group is a file next to verification.json, `verification-GGGGG.json`, which does not depend on N. It holds
for the files that were read, as verification.json does. The last step adds the proofs up, writes verification.json and
removes them, so that the folder is as if one process had verified it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic

from gaudi_bert.artefacts.base import group_verification_path
from gaudi_bert.artefacts.completion import begin_artefact, parts_of, settings_path
from gaudi_bert.artefacts.grouped_output import GroupedOutput
from gaudi_bert.artefacts.packed import GroupVerification
from gaudi_bert.artefacts.results import GroupsResult, StageOutput
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.artefacts.store.mirrored_folder import fetch, remove
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.files import exclusive_lock
from gaudi_bert.proof.folder import ProvenGroup, Prover, Stored, VerifiedFolder, check_metadata, identity_of, verify_folder

_NAMED = 3


@dataclass(frozen=True)
class _GroupProofs(GroupedOutput[int, GroupVerification]):
    """The proofs of groups; `files_sha256` is that of the files of a group as they are now."""

    files_sha256: Callable[[int], str]

    @property
    def artefact(self) -> Path:
        """The file that is written last."""
        return self.final

    def _problem(self, group: int, proof: GroupVerification) -> str | None:
        """Why a stored proof does not hold for this group; None where it does."""
        if proof.signature_sha256 != self.signature.sha256:
            return "is of another packed folder, or of other records"
        if not proof.is_as_written:
            return "was changed after it was written"
        if proof.group != group:
            return f"is that of group {proof.group}"
        if proof.files_sha256 != self.files_sha256(group):
            return "is of files that have changed since, or of which these are copies"
        return None

    def _read(self, group: int) -> GroupVerification | None:
        proof = self.summary.read_if_present(self.summary_path(group))
        return None if proof is None or self._problem(group, proof) else proof

    def describe(self, group: int) -> str:
        """Why a group is not verified."""
        path = self.summary_path(group)
        fetch(path)
        proof = self.summary.read_if_present(path)
        problem = proof and self._problem(group, proof)
        return f"{path.name} {problem}" if problem else f"group {group} has no proof"


def verify_packs(prover: Prover[Stored], run: StageRun) -> StageOutput[Stored] | GroupsResult:
    """Verify a packed folder: all of it, the groups of a part, or the last step when all parts are done."""
    if run.does_all:
        return verify_folder(prover, run.overwrite)
    folder = _PartlyVerified(prover)
    return folder.finish() if run.finish else folder.prove_part(run)


@dataclass(frozen=True)
class _PartlyVerified(Generic[Stored]):
    """A packed folder whose groups are verified one by one."""

    prover: Prover[Stored]

    @property
    def folder(self) -> VerifiedFolder[Stored]:
        """The folder, and where its result is stored."""
        return self.prover.verified

    def prove_part(self, run: StageRun) -> StageOutput[Stored] | GroupsResult:
        """Prove the groups of a part that have no proof yet; with `overwrite` all of them.

        The result has the totals of these groups, or of the complete folder where it was verified already.
        """
        stored = None if run.overwrite else self.folder.stored()
        if stored is not None:
            return stored
        self._check_writable()
        numbers = run.share_of(self.folder.groups)
        proofs, out = self._proofs(), self.folder.out
        with exclusive_lock(settings_path(out), str(out), wait=True):
            # Another process may have proven all of it, and removed the proofs of groups, before this one had the lock.
            stored = None if run.overwrite else self.folder.stored()
            if stored is not None:
                return stored
            self.folder.begin(keep_groups=True)
        if run.overwrite:
            remove(*(path for path in map(proofs.summary_path, numbers) if path.exists()))
        pending = list(numbers) if run.overwrite else proofs.missing(numbers)
        # Before anything is read: a file that changes while it is read is then noticed.
        files = {number: proofs.files_sha256(number) for number in pending}

        for proven in self.prover.prove(pending, in_parts=True):
            proof = GroupVerification.of(
                format_version=1,
                signature_sha256=proofs.signature.sha256,
                files_sha256=files[proven.group],
                **{key: value for key, value in proven._asdict().items() if value is not None},
            )
            proof.write(proofs.summary_path(proven.group))
        sums = dict.fromkeys(("sequences", "packs", "tokens"), 0)
        for _, proof in proofs.iter_completed(numbers):
            for key in sums:
                sums[key] += getattr(proof, key)
        return GroupsResult(len(numbers), len(pending), **sums)

    def finish(self) -> StageOutput[Stored]:
        """Write verification.json where every group has its proof; nothing is read but these, manifests and names."""
        out = self.folder.out
        stored = self.folder.stored()
        if stored is not None:
            if self.folder.is_writable:
                remove(*parts_of(out))  # a process that was killed here did not remove them
            return stored
        self._check_writable()
        _ = self.folder.identity  # before the proofs are held to the files
        proofs = self._proofs()
        proof = self.prover.add_up(self._all_proofs(proofs))
        check_metadata(self.folder.packed, self.folder.metadata, proof.metadata)
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
            lambda group: identity_of(self.prover.files_of(group)),
        )

    def _all_proofs(self, proofs: _GroupProofs) -> Iterator[ProvenGroup]:
        """The proofs of all groups, one at a time; what is missing, or does not hold, is an error."""
        missing = set(self.folder.groups)
        for group, proof in proofs.iter_completed(self.folder.groups):
            missing.discard(group)
            yield ProvenGroup(**{key: getattr(proof, key) for key in ProvenGroup._fields})
        if missing:
            named = ", ".join(map(proofs.describe, sorted(missing)[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
            raise FailedError(
                f"{self.folder.packed}: {len(missing)} of {len(self.folder.groups)} groups are not verified: {named};"
                " run `gaudi-bert verify --shard K/N` for every K and then finish again"
            )
