"""Vectors as a Parquet table: one column `embedding` of lists of float32."""

from __future__ import annotations

from typing import BinaryIO

from gaudi_bert.common.arrays import Float32Array
from gaudi_bert.records.tables.arrow import require_pyarrow

__all__ = ["write_vectors"]

ROWS_OF_A_GROUP = 8192


def write_vectors(handle: BinaryIO, vectors: Float32Array) -> None:
    """Write `vectors`, [rows, width], a group of rows at a time."""
    pyarrow = require_pyarrow()
    from pyarrow import parquet

    width = vectors.shape[1]
    schema = pyarrow.schema([("embedding", pyarrow.list_(pyarrow.float32(), width))])
    with parquet.ParquetWriter(handle, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, len(vectors), ROWS_OF_A_GROUP):
            flat = pyarrow.array(vectors[first : first + ROWS_OF_A_GROUP].reshape(-1), pyarrow.float32())
            column = pyarrow.FixedSizeListArray.from_arrays(flat, width)
            writer.write_table(pyarrow.table([column], schema=schema))
