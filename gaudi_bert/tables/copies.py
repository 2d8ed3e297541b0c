"""Copies of a packed folder for other trainers: Parquet, and the metadata file of the predecessor."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.artefacts.results import CopiesResult
from gaudi_bert.common.progress import Reporter, count_of
from gaudi_bert.tables.packed_parquet import write_packed_parquet
from gaudi_bert.tfrecords.packed_folder import write_predecessor_metadata


def packed_copies(
    packed: Path, plan: Path, *, parquet: bool, predecessor_metadata: bool, reporter: Reporter
) -> CopiesResult:
    """Write the packs of a finished folder also as Parquet, or the metadata file that the predecessor's trainer reads.

    Args:
        parquet: write one Parquet file per shard, in `<packed>/parquet/`.
        predecessor_metadata: write `<packed>_metadata.json` next to the folder.
    """
    written: dict[str, str] = {}
    if parquet:
        result = write_packed_parquet(packed, reporter=reporter)
        written["parquet"] = result["folder"]
        reporter.say(
            f"{result['folder']}: {count_of(result['packs'], 'pack')} in {count_of(result['files'], 'Parquet file')}"
        )
    if predecessor_metadata:
        written["predecessor_metadata"] = str(write_predecessor_metadata(packed, plan))
        reporter.say(f"{written['predecessor_metadata']}: the metadata for the predecessor's trainer")
    return CopiesResult(**written)
