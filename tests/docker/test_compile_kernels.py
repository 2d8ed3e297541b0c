"""Kernels that are compiled in advance."""

from __future__ import annotations

from pathlib import Path

from tests.builders.command_line import run_python

FOLDER = Path(__file__).resolve().parents[2] / "docker"

# A trainer's reading of packs of depth 3 and 5, and the numbers of kernels compiled for it.
READING = """
import sys, tempfile
from pathlib import Path
import numpy as np
from numba.core import event
from gaudi_bert.artefacts.packed import RecordMetadata
sys.path.insert(0, sys.argv[1])
from compile_kernels import _compile_records, _prepare, _SILENT
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.tfrecords.wire.values import compute_packed_table_columns
from gaudi_bert.tfrecords.write import pack_records
from gaudi_bert.tfrecords.random_access import open_shards
_compile_records()
with tempfile.TemporaryDirectory() as folder, event.install_recorder("numba:compile") as compiled:
    records = _prepare(Path(folder))
    for depth in (1, 3, 5):
        packed = Path(folder, f"packed-{depth}")
        settings = PackingSettings(shard_multiple=2, algorithm="lpfhp", depth=depth)
        pack_records(records, packed, settings, _SILENT, verify=True)
        files = open_shards(packed, RecordMetadata.read(packed))
        compute_packed_table_columns(files.read_records(np.zeros(2, np.int64), np.arange(2)))
print(len(compiled.buffer))
"""


def test_packs_of_every_depth_are_read_by_what_was_compiled() -> None:
    assert run_python(READING, str(FOLDER)).stdout.strip() == "0"
