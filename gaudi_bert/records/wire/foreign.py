"""Files of other tools that people take for RECORDS: what they are, and the way in from there."""

from __future__ import annotations

from pathlib import Path

__all__ = ["foreign_format"]

TAR_MAGIC = slice(257, 262)
MEGATRON_INDEX = b"MMIDIDX"
TABLES = {b"PAR1": "a Parquet table", b"ARROW1": "an Arrow table"}
AS_A_TABLE = "write its token ids as a Parquet table with a list column `input_ids` and run `gaudi-bert import` on that"


def foreign_format(path: Path) -> str | None:
    """What a file that is no TFRecord is, and what to do with it; None where that is not known.

    Raises:
        OSError: it cannot be read.
    """
    head = _head(path, 512)
    if head[TAR_MAGIC] == b"ustar" or path.name.endswith((".tar.gz", ".tgz")):
        return f"a tar archive, as WebDataset writes them; {AS_A_TABLE}"
    index = path.with_suffix(".idx") if path.suffix == ".bin" else path
    if _head(index, len(MEGATRON_INDEX)) == MEGATRON_INDEX:
        return f"one of the two files of a Megatron data set (.bin and .idx); {AS_A_TABLE}"
    for magic, name in TABLES.items():
        if head.startswith(magic):
            return f"{name}; run `gaudi-bert import` on it first"
    return None


def _head(path: Path, count: int) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as handle:
        return handle.read(count)
