"""What a packed folder can be given besides its TFRecords, for other trainers."""

from __future__ import annotations

from pathlib import Path

from gaudi_bert.common.progress import Reporter
from gaudi_bert.stages.results import CopiesResult

__all__ = ["packed_copies"]


def packed_copies(
    packed: Path, plan: Path, *, parquet: bool, predecessor_metadata: bool, reporter: Reporter
) -> CopiesResult:
    """Write the packs as Parquet too (in `<packed>/parquet/`), or the metadata file that the predecessor's trainer reads.

    Args:
        packed: a finished packed folder.
        plan: the plan.json it was written from.
        parquet: write one Parquet file per shard.
        predecessor_metadata: write `<packed>_metadata.json` beside the folder.
        reporter: where progress goes.

    Raises:
        InputError: the folder is not finished, pyarrow is missing, or the predecessor's trainer could not read the packs.
        FailedError: a file cannot be written.
    """
    written: dict[str, str] = {}
    if parquet:
        from gaudi_bert.records.tables.packed_parquet import write_packed_parquet

        result = write_packed_parquet(packed, reporter=reporter)
        written["parquet"] = result["folder"]
        reporter.say(f"{result['folder']}: {result['packs']:,} packs in {result['files']} Parquet files")
    if predecessor_metadata:
        from gaudi_bert.records.predecessor import write_predecessor_metadata

        written["predecessor_metadata"] = str(write_predecessor_metadata(packed, plan))
        reporter.say(f"{written['predecessor_metadata']}: the metadata for the predecessor's trainer")
    return CopiesResult(**written)
