"""verification.json: the result of `verify`, of packed TFRecords and of packed tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from typing_extensions import Self

from gaudi_bert.artefacts.base import Count, Figures, Positive
from gaudi_bert.artefacts.completion import first_difference
from gaudi_bert.artefacts.packed import Metadata, TableMetadata, TooLongRows
from gaudi_bert.artefacts.references import VERIFICATION_NAME
from gaudi_bert.artefacts.shards import ShardTable
from gaudi_bert.common.arrays import IntArray
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.values import matching


class _Verified(Figures):
    """verification.json: the result of `verify`. It lies in the verified folder, and only where the proof succeeded."""

    file_name = VERIFICATION_NAME
    remedy = "remove it and verify again"
    only_read: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read_of(cls, path: Path, metadata: Any) -> Self:
        """The verification of a folder with this metadata, which a false one does not go with."""
        stored = cls.read(path)
        kept = {key: getattr(stored, key) for key in cls.only_read}
        difference = first_difference(stored.as_json(), cls.of(metadata, **kept).as_json(), "by metadata.json")
        if difference is not None:
            raise InputError(f"{cls.path_in(path)}: {difference}; {cls.remedy}")
        return stored

    @classmethod
    def of(cls, *args: Any, **only_read: Any) -> Self:
        """The verification of a folder with this metadata; `only_read` are the keys that only reading the data tells."""
        raise NotImplementedError


class Verification(_Verified):
    """The verification of packed TFRecords.

    Attributes:
        fingerprint: of all sequences, whatever their order: 16 hexadecimal digits.
        balanced: whether the shards of each group differ by at most one pack.
        dropped_packs: packs of an epoch that 1 .. 32 workers cannot share evenly; our readers continue, others drop them.
        mixing: standard deviation of sequences per batch over that of independent draws; None for too few packs.
    """

    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    input_files: Count
    fingerprint: Annotated[str, matching("[0-9a-f]{16}", "16 digits from 0 to f")]
    balanced: bool
    most_dropped_packs: Count
    dropped_packs: dict[str, Count]
    mixing: float | None
    fairly_mixed: bool
    mixing_batch_packs: Positive

    only_read = ("fingerprint", "mixing")

    @classmethod
    def of(cls, metadata: Metadata, fingerprint: str, mixing: float | None) -> Self:
        """The verification of a folder with this metadata; only reading its data tells the fingerprint and the mixing."""
        table = metadata.shard_table
        dropped, batch = dropped_packs(metadata.packs), mixing_batch_packs(table.packs)
        batches = int((table.packs // batch).sum())
        mixing = mixing if tells_mixing(batch, batches) else None
        return cls(
            sequences=metadata.sequences,
            tokens=metadata.tokens,
            packs=metadata.packs,
            shards=len(table),
            input_files=metadata.packed_files,
            fingerprint=fingerprint,
            balanced=is_balanced(table),
            most_dropped_packs=max(dropped.values()),
            dropped_packs={str(workers): count for workers, count in dropped.items()},
            mixing=mixing,
            fairly_mixed=is_fair(mixing, batches),
            mixing_batch_packs=batch,
        )


# How even the shards are, and whether any batch is a fair sample of the data: the number of sequences in a batch of b packs
# varies as if the packs were drawn independently, whose standard deviation is that of one pack times the square root of b.
# A folder with one strategy per file (as the predecessor wrote) varies many times more.

_FAIR_RATIO = 1.2
_FEWEST_BATCHES = 20
_MOST_WORKERS = 32


def mixing_batch_packs(packs: IntArray) -> int:
    """The largest batch, a power of two up to 256, of which the median shard holds at least four; int64 [shards]."""
    median = int(np.sort(packs)[len(packs) // 2]) if len(packs) else 0
    return int(2 ** min(8, max(0, int(math.log2(max(1, median // 4))))))


def tells_mixing(batch_packs: int, batches: int) -> bool:
    """Whether so many batches can tell how well they are mixed."""
    return batch_packs >= 2 and batches >= _FEWEST_BATCHES


def is_fair(ratio: float | None, batches: int) -> bool:
    """Whether a ratio of deviations is at most 1.2, or within four standard errors of 1 where there are few batches."""
    return ratio is None or ratio <= max(_FAIR_RATIO, 1 + 4 / math.sqrt(2 * max(1, batches)))


def is_balanced(table: ShardTable) -> bool:
    """Whether the shards of each group hold equal packs, to within one."""
    if not len(table):
        return True
    most, least = (function.reduceat(table.packs, table.group_firsts) for function in (np.maximum, np.minimum))
    return bool((most - least <= 1).all())


def dropped_packs(packs: int) -> dict[int, int]:
    """Packs of an epoch that do not go round, by number of workers W = 1 .. 32, when rank r takes pack i with i mod W = r.

    Our trainer counts on into the next epoch and drops none of them; a reader that ends with the epoch drops them.
    """
    return {workers: packs % workers for workers in range(1, _MOST_WORKERS + 1)}


class TableVerification(_Verified):
    """The verification of packed tables."""

    format: Literal["table"]
    rows: Count
    sequences: Count
    tokens: Count
    packs: Count
    shards: Count
    groups: Count
    columns: tuple[str, ...]
    index_only: bool
    too_long: TooLongRows

    @classmethod
    def of(cls, metadata: TableMetadata) -> Self:
        """The verification of a folder with this metadata: all of it follows."""
        copied = ("format", "rows", "sequences", "tokens", "packs", "index_only", "too_long")
        columns = () if metadata.index_only else (*metadata.aligned_columns, *metadata.scalar_columns)
        counts: dict[str, Any] = {"groups": metadata.group_count, "shards": len(metadata.shard_table)}
        return cls(**{key: getattr(metadata, key) for key in copied}, **counts, columns=columns)
