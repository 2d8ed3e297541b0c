"""TRL's own packing, where TRL is installed: it wants tokens, so each sequence is made of as many bytes as it has tokens."""

from __future__ import annotations

import numpy as np

from gaudi_bert.common.arrays import Int32Array

__all__ = ["pack_with_trl"]


def pack_with_trl(lengths: Int32Array, max_sequence_length: int) -> int:
    """Number of packs that `trl.pack_dataset` makes of rows with these lengths by its strategy `bfd`, default settings."""
    import pyarrow
    from datasets import Dataset, disable_progress_bars
    from datasets.table import InMemoryTable
    from trl import pack_dataset

    disable_progress_bars()
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    values = pyarrow.array(np.zeros(offsets[-1], np.int8))
    rows = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), values)
    table = InMemoryTable(pyarrow.table({"input_ids": rows}))
    return len(pack_dataset(Dataset(table), max_sequence_length, "bfd"))
