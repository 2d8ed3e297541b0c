"""verification.json: what the proof of a packed folder found. It lies in that folder, so whoever removes the one removes the
other, and it exists only where the proof succeeded. The first edition kept it as `verify.json` in the work folder."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from gaudi_bert.artefacts.model import Count, Figures, Positive, read_artefact
from gaudi_bert.common.files import write_json

__all__ = ["Verification", "read_verification", "write_verification"]


class Verification(Figures):
    """The result of `verify`.

    Attributes:
        fingerprint: of all sequences, whatever their order: 16 hexadecimal digits.
        balanced: whether the shards of each group differ by at most one pack.
        dropped_packs: packs of an epoch that do not go round among 1 .. 32 workers; ours count on, others drop them.
        mixing: standard deviation of sequences per batch over that of independent draws; None for too few packs.
    """

    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    input_files: Count
    fingerprint: str = Field(pattern=r"^[0-9a-f]{16}$")
    balanced: bool
    most_dropped_packs: Count
    dropped_packs: dict[str, Count]
    mixing: float | None
    fairly_mixed: bool
    mixing_batch_packs: Positive


def read_verification(path: Path) -> Verification:
    """Read what a verification found.

    Raises:
        InputError: the file is missing or damaged.
    """
    return read_artefact(path, Verification, "remove it and verify again")


def write_verification(path: Path, content: Verification) -> None:
    """Write what a verification found, whole or not at all."""
    write_json(path, content.as_json())
