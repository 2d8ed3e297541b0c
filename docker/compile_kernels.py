"""Compile kernels before their first use, by using them once on generated data: images and `make setup` do.

python docker/compile_kernels.py              all of them
python docker/compile_kernels.py records      what reads, packs and verifies records (and tables, HDF5 files)
python docker/compile_kernels.py nnls         what plans by the default algorithm
python docker/compile_kernels.py solvers      what plans by any algorithm
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.packed import RecordMetadata
from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.errors import InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings, PrepareSettings, TableSettings
from gaudi_bert.corpus.prepare import prepare_examples
from gaudi_bert.packing.algorithms import ALGORITHMS, pack_histogram
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.packing.pack_lengths import pack_lengths
from gaudi_bert.reading.global_order import GlobalOrder
from gaudi_bert.reading.streams import StreamReader
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tfrecords.plan import count_records
from gaudi_bert.tfrecords.random_access import RecordFiles, open_shards
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.hdf5 import require_h5py
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema
from gaudi_bert.tfrecords.wire.values import compute_packed_table_columns
from gaudi_bert.tfrecords.write import pack_records

_LENGTH, _PREDICTIONS = 32, 5
_LONG_PACK = 5003
"""Tokens; the sequences of long packs are dealt, swapped and matched."""
_SILENT = StageRun(Reporter(quiet=True))
_TABLES = TableSettings(max_sequence_length=_LENGTH, shard_multiple=1, algorithm="lpfhp")


def _compile_records() -> None:
    """Prepare, count, pack, verify and read as every stage does, by an algorithm that needs no solver."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        records = _prepare(folder)
        file = sorted(records.glob("part-*"))[0]
        decode_example(next(iter(read_records(file))))
        RecordFiles([file], UnpackedSchema(_LENGTH, _PREDICTIONS)).read_records(np.zeros(2, np.int64), np.arange(2))
        packed = folder / "packed"
        pack_records(records, packed, PackingSettings(shard_multiple=2, algorithm="lpfhp"), _SILENT, verify=True)
        metadata = RecordMetadata.read(packed)
        files, order = open_shards(packed, metadata), GlobalOrder(metadata.shard_table.packs, seed=7)
        compute_packed_table_columns(
            files.read_records(*StreamReader(files, order).locate_and_open(0, np.zeros(1, np.int64)))
        )
        pack_lengths([5, 9, 17, 30], _LENGTH, algorithm="lpfhp")
        if importlib.util.find_spec("pyarrow") is not None:
            rows = [{"input_ids": [1] * size, "labels": [-100, *[2] * (size - 1)]} for size in range(2, _LENGTH)]
            table = folder / "rows.jsonl"
            table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
            pack_table(table, folder / "packed-table", _TABLES, _SILENT, verify=True)
        if importlib.util.find_spec("h5py") is not None:
            _count_hdf5(folder)


def _prepare(folder: Path) -> Path:
    generator = random.Random(7)
    words = ["alpha", "beta", "gamma", "delta", "river", "stone", "green", "quick", "sings", "under", "over", "the", "a"]
    sentences = [" ".join(generator.choices(words, k=generator.randint(2, 9))) + "." for _ in range(400)]
    documents = ["\n".join(sentences[start : start + 10]) for start in range(0, len(sentences), 10)]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    sizes = {"max_sequence_length": _LENGTH, "max_predictions": _PREDICTIONS, "shards": 2}
    settings = PrepareSettings(text="text.txt", train_vocab=101, **sizes)
    prepare_examples(settings, folder / "examples", _SILENT, pipeline_folder=folder)
    return folder / "examples" / "train"


def _count_hdf5(folder: Path) -> None:
    tokens = {"input_ids": 9, "input_mask": 1, "segment_ids": 0}
    columns = {name: np.full((3, _LENGTH), value) for name, value in tokens.items()}
    columns.update({name: np.ones((3, _PREDICTIONS), np.int64) for name in ("masked_lm_positions", "masked_lm_ids")})
    with require_h5py().File(folder / "rows.hdf5", "w") as file:
        for name, values in {**columns, "next_sentence_labels": np.zeros(3, np.int64)}.items():
            file[name] = values
    count_records(folder / "rows.hdf5", folder / "histogram-hdf5.json", _SILENT)


def _compile_nnls() -> None:
    settings = PackingSettings()
    pack_histogram(Histogram(_LENGTH, np.arange(_LENGTH)), settings.algorithm, settings.depth)


def _compile_solvers() -> None:
    """Plan by every algorithm; by `optimal` also with thousands of lengths, and for long packs."""
    generator = np.random.default_rng(7)
    few, many = Histogram(96, generator.integers(0, 50, 96)), Histogram(2600, generator.integers(1, 3, 2600))
    each = np.arange(1, _LONG_PACK + 1)
    long = Histogram(_LONG_PACK, ((each > _LONG_PACK // 7) & (each <= _LONG_PACK // 5 * 2)).astype(np.int64))
    for algorithm in ALGORITHMS:
        for depth in (3, "max"):
            pack_histogram(few, algorithm, depth)
    for counted in (many, long):
        pack_histogram(counted, "optimal", 4)


_PARTS = {"records": _compile_records, "nnls": _compile_nnls, "solvers": _compile_solvers}


def compile_kernels(*parts: str) -> None:
    """Compile these parts (default: all), or load what is compiled already."""
    for part in parts or _PARTS:
        if part not in _PARTS:
            raise InputError(f"{part!r} is not a part of the kernels; known: {', '.join(_PARTS)}")
        _PARTS[part]()


if __name__ == "__main__":
    compile_kernels(*sys.argv[1:])
