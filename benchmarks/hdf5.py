"""How fast HDF5 files are read as records, compared with h5py reading all datasets and doing nothing else.

    python benchmarks/hdf5.py [--folder DIR] [--rounds N]

Data: 4 files of 20,000 examples of the wikipedia-512 histogram, with types and compression as the vendor's script writes
them. What is compared alternates, round by round; printed are medians and the range.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import show, show_processor, timed
from records_data import QUIET, SEED, make_files

from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.tfrecords.histogram import histogram
from gaudi_bert.tfrecords.wire.example import decode_example
from gaudi_bert.tfrecords.wire.framing import read_records
from gaudi_bert.tfrecords.wire.hdf5 import require_h5py

FILES, ROWS = 4, 20_000
TYPES = {
    "input_ids": "i4",
    "input_mask": "i1",
    "segment_ids": "i1",
    "masked_lm_positions": "i4",
    "masked_lm_ids": "i4",
    "next_sentence_labels": "i1",
}


def main() -> None:
    """Write the data where they are missing, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gaudi-bert-bench-hdf5")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    records = arguments.folder / "hdf5"
    paths = [as_hdf5(path, records) for path in make_files(arguments.folder / "tfrecord", FILES, ROWS, SEED)]
    show_processor()
    ways = {
        "h5py": lambda: read_all(paths),
        "one thread": lambda: histogram(records, arguments.folder / "1.json", StageRun(QUIET, workers=1)),
        "all cores": lambda: histogram(records, arguments.folder / "2.json", StageRun(QUIET)),
    }
    seconds = {name: np.zeros((arguments.rounds, 2)) for name in ways}
    for turn in range(arguments.rounds + 1):
        for name, way in ways.items():
            for path in arguments.folder.glob("*.json"):
                path.unlink()
            measured = timed(way)
            if turn:  # the first round only warms up
                seconds[name][turn - 1] = measured
    cpu, wall = ({name: values[:, column] for name, values in seconds.items()} for column in (0, 1))
    show("h5py alone", FILES * ROWS / cpu["h5py"], "rows/s CPU")
    show("histogram, one thread", FILES * ROWS / cpu["one thread"], "rows/s CPU")
    show("CPU, h5py / ours (one thread)", cpu["h5py"] / cpu["one thread"], "times")
    show("wall, h5py / ours (one thread)", wall["h5py"] / wall["one thread"], "times")
    show("wall, h5py / ours (all cores)", wall["h5py"] / wall["all cores"], "times")


def as_hdf5(path: Path, folder: Path) -> Path:
    """The examples of a TFRecord file as HDF5."""
    target = folder / f"{path.stem}_training.hdf5"
    if not target.exists():
        folder.mkdir(exist_ok=True)
        examples = [decode_example(payload) for payload in read_records(path)]
        temporary = target.with_suffix(".tmp")
        with require_h5py().File(temporary, "w") as file:
            for name, kind in TYPES.items():
                values = np.stack([example[name] for example in examples])
                values = values.reshape(-1) if name == "next_sentence_labels" else values
                file.create_dataset(name, data=values, dtype=kind, compression="gzip")
        temporary.rename(target)
    return target


def read_all(paths: Sequence[Path]) -> None:
    """Read every dataset of the files."""
    for path in paths:
        with require_h5py().File(path) as file:
            for name in file:
                file[name][:]


if __name__ == "__main__":
    main()
