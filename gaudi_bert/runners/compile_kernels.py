"""Builds the compiled kernels of an installation before their first use, by using all of them once on generated data.

    python -m gaudi_bert.runners.compile_kernels            all of them (the data image, tests), in two processes
    python -m gaudi_bert.runners.compile_kernels demo       those that the demo uses (`make setup`), in two processes
    python -m gaudi_bert.runners.compile_kernels records    those that read records (training images)
    python -m gaudi_bert.runners.compile_kernels packing    those that plan
    python -m gaudi_bert.runners.compile_kernels nnls       those that plan by the default algorithm

Without it, each kernel is compiled where it is first called, and stored (`common/compiled.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.common.compiled import QUIET, announce_kernels
from gaudi_bert.common.errors import FailedError, InputError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings, PrepareSettings, TableSettings
from gaudi_bert.corpus.prepare import prepare
from gaudi_bert.packing.algorithms import ALGORITHMS, pack_histogram
from gaudi_bert.packing.histogram import Histogram
from gaudi_bert.reading.global_order import GlobalOrder
from gaudi_bert.reading.streams import StreamReader
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tfrecords.arrays import pack_rows
from gaudi_bert.tfrecords.histogram import histogram
from gaudi_bert.tfrecords.pack import pack
from gaudi_bert.tfrecords.packed_folder import open_shards, read_metadata
from gaudi_bert.tfrecords.random_access import RecordFiles
from gaudi_bert.tfrecords.wire.example import decode_example, encode_example
from gaudi_bert.tfrecords.wire.framing import read_records, write_record
from gaudi_bert.tfrecords.wire.hdf5 import require_h5py
from gaudi_bert.tfrecords.wire.schema import UnpackedSchema

_PARTS = ("all", "demo", "records", "packing", "nnls")
_WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "green", "quick", "sings", "under", "over", "the", "a"]
LENGTH, PREDICTIONS = 96, 7
_LONG_PACK = 5003
"""Tokens; the sequences of long packs are dealt, swapped and matched."""
_SILENT = StageRun(Reporter(quiet=True))
_READING = ("gaudi_bert.common.", "gaudi_bert.tfrecords.", "gaudi_bert.tables.")


def compile_kernels(part: str = "all") -> None:
    """Compile one of `_PARTS`, or load what is compiled already."""
    if part not in _PARTS:
        raise InputError(f"{part!r} is not a part of the kernels; known: {', '.join(_PARTS)}")
    if part == "packing":
        _plan()
    elif part == "nnls":
        _plan_by_default()
    else:
        with tempfile.TemporaryDirectory() as temporary:
            if part == "records":
                _count_records(Path(temporary))
            else:
                _compile_in_two_processes(part, Path(temporary))


def _compile_in_two_processes(part: str, folder: Path) -> None:
    """What plans in one, quietly, what makes and reads records in the other; then what needs both."""
    if part == "all":
        announce_kernels(module for name, module in list(sys.modules.items()) if name.startswith(_READING))
    command = [sys.executable, "-m", __spec__.name, "packing" if part == "all" else "nnls"]
    planning = subprocess.Popen(command, env={**os.environ, QUIET: "1"})
    try:
        sources = [make(folder) for make in (_prepare, _count_records)]
    finally:
        ended = planning.wait()
    if ended:
        raise FailedError("the packing kernels could not be compiled; the reason is above")
    for source in sources:
        _pack(source, folder / f"packed-{source.name}")
    if part == "all" and importlib.util.find_spec("pyarrow") is not None:
        _pack_table(folder)
    if part == "all" and importlib.util.find_spec("h5py") is not None:
        _count_hdf5(folder)


def _pack_table(folder: Path) -> None:
    """Pack and prove a small table; the kernels take values of any type."""
    table = folder / "rows.jsonl"
    rows = [{"input_ids": [1] * size, "labels": [-100, *[2] * (size - 1)]} for size in range(2, LENGTH)]
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = TableSettings(max_sequence_length=LENGTH, shard_multiple=1)
    pack_table(table, folder / "packed-table", settings, _SILENT, verified=True)


def _count_hdf5(folder: Path) -> None:
    """Count the rows of an HDF5 file."""
    tokens = {"input_ids": 9, "input_mask": 1, "segment_ids": 0}
    columns = {name: np.full((3, LENGTH), value) for name, value in tokens.items()}
    columns.update({name: np.ones((3, PREDICTIONS), np.int64) for name in ("masked_lm_positions", "masked_lm_ids")})
    with require_h5py().File(folder / "rows.hdf5", "w") as file:
        for name, values in {**columns, "next_sentence_labels": np.zeros(3, np.int64)}.items():
            file[name] = values
    histogram(folder / "rows.hdf5", folder / "histogram-hdf5.json", _SILENT)


def _plan_by_default() -> None:
    """Plan with the defaults of a pipeline."""
    settings = PackingSettings()
    pack_histogram(Histogram(LENGTH, np.arange(LENGTH)), settings.algorithm, settings.depth)


def _plan() -> None:
    """Plan by every algorithm; by `optimal` also with thousands of lengths, and for long packs."""
    generator = np.random.default_rng(7)
    few, many = Histogram(LENGTH, generator.integers(0, 50, LENGTH)), Histogram(2600, generator.integers(1, 3, 2600))
    each = np.arange(1, _LONG_PACK + 1)
    long = Histogram(_LONG_PACK, ((each > _LONG_PACK // 7) & (each <= _LONG_PACK // 5 * 2)).astype(np.int64))
    for algorithm in ALGORITHMS:
        for depth in (3, "max"):
            pack_histogram(few, algorithm, depth)
    for counted in (many, long):
        pack_histogram(counted, "optimal", 4)


def _pack(records: Path, packed: Path) -> None:
    """Pack, verify, and read a pack as a trainer does."""
    pack(records, packed, PackingSettings(shard_multiple=2), _SILENT, verified=True)
    metadata = read_metadata(packed)
    files, order = open_shards(packed, metadata), GlobalOrder(metadata.shard_table.packs, seed=7)
    pack_rows(files.read(*StreamReader(files, order).locate(0, np.zeros(1, np.int64))))


def _prepare(folder: Path) -> Path:
    """Make examples of random sentences."""
    generator = random.Random(7)
    sentences = [" ".join(generator.choices(_WORDS, k=generator.randint(2, 9))) + "." for _ in range(400)]
    documents = ["\n".join(sentences[start : start + 10]) for start in range(0, len(sentences), 10)]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    settings = PrepareSettings(text="text.txt", train_vocab=101, max_sequence_length=32, max_predictions=5, shards=2)
    prepare(settings, folder / "examples", _SILENT, pipeline_folder=folder)
    return folder / "examples" / "train"


def _count_records(folder: Path) -> Path:
    """Read records of random lengths as training, evaluation and the histogram do."""
    records = folder / "records" / "part.tfrecord"
    _write_records(records, 2000)
    for payload in read_records(records):
        decode_example(payload)
    RecordFiles([records], UnpackedSchema(LENGTH, PREDICTIONS)).read(np.zeros(2, np.int64), np.arange(2))
    histogram(records.parent, folder / "histogram.json", _SILENT)
    return records.parent


def _write_records(path: Path, count: int) -> None:
    generator = random.Random(7)
    path.parent.mkdir(parents=True)
    with open(path, "wb") as handle:
        for _ in range(count):
            used = generator.randint(PREDICTIONS + 2, LENGTH)
            masked = 1 + used % PREDICTIONS
            features: dict[str, list[int] | list[float]] = {
                "input_ids": [generator.randint(5, 60) for _ in range(used)] + [0] * (LENGTH - used),
                "input_mask": [1] * used + [0] * (LENGTH - used),
                "segment_ids": [0] * LENGTH,
                "masked_lm_positions": list(range(1, 1 + masked)) + [0] * (PREDICTIONS - masked),
                "masked_lm_ids": [9] * masked + [0] * (PREDICTIONS - masked),
                "masked_lm_weights": [1.0] * masked + [0.0] * (PREDICTIONS - masked),
                "next_sentence_labels": [used % 2],
            }
            write_record(handle, encode_example(features))


if __name__ == "__main__":
    compile_kernels(*sys.argv[1:])
