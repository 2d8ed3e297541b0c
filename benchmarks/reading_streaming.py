"""Reading packs beside MosaicML's streaming: the same packs as MDS, from a cold disk and in the steady state.

    python -m venv /tmp/streaming && /tmp/streaming/bin/pip install mosaicml-streaming
    python benchmarks/reading_streaming.py --streaming /tmp/streaming/bin/python [--sequences 120000] [--rounds 5]

Both give rows of 512 in a seeded order, without workers, in batches of 16. A round is a process of each, alternating: the
first 256 rows with the packs out of the page cache (seconds after imports, bytes from the disk), then all others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FIRST_ROWS, BATCH = 256, 16
COLUMNS = ("input_ids", "token_type_ids", "position_ids", "sequence_ids", "labels")

# What the children run: FOLDER FIRST_ROWS BATCH.
MEASURE = """
import json, sys, time
folder, first_rows, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def read_bytes():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("read_bytes"))

def measure(open_rows):
    read, started = read_bytes(), time.perf_counter()
    rows = iter(open_rows())
    for _ in range(first_rows):
        next(rows)
    seconds, read = time.perf_counter() - started, read_bytes() - read
    cpu, count = time.process_time(), sum(1 for _ in rows)
    rate = count / (time.process_time() - cpu)
    print(json.dumps({"seconds": seconds, "megabytes": read / 1e6, "rows": rate}))
"""
OURS = f"""{MEASURE}
from gaudi_bert.pytorch import PackedDataset
def rows():
    for row in PackedDataset(folder, batch_packs=batch):
        yield {{name: row[name] for name in {COLUMNS}}}
measure(rows)
"""
STREAMING = f"""{MEASURE}
from streaming import StreamingDataset
measure(lambda: StreamingDataset(local=folder, shuffle=True, batch_size=batch))
"""
TO_MDS = """
import sys, numpy
from streaming import MDSWriter
folder, out, *names = sys.argv[1:]
columns = {name: numpy.load(f"{folder}/{name}.npy", mmap_mode="r") for name in names}
kinds = {name: f"ndarray:int32:{values.shape[1]}" for name, values in columns.items()}
with MDSWriter(out=out, columns=kinds) as writer:
    for number in range(len(columns[names[0]])):
        writer.write({name: numpy.ascontiguousarray(values[number]) for name, values in columns.items()})
"""


def make_packs(folder: Path, sequences: int) -> Path:
    """Packs of random sequences with the lengths of Wikipedia."""
    from rehearsal import make_records

    from gaudi_bert.common.progress import Reporter
    from gaudi_bert.config.sections import PackingSettings
    from gaudi_bert.stages.data.pack import pack

    make_records(folder / "records", sequences)
    pack(folder / "records", folder / "packed", PackingSettings(), reporter=Reporter(quiet=True))
    return folder / "packed"


def make_mds(packed: Path, folder: Path, python: str) -> Path:
    """The same packs as MDS."""
    from gaudi_bert.pytorch import PackedDataset

    rows = list(PackedDataset(packed))
    for name in COLUMNS:
        np.save(folder / f"{name}.npy", np.stack([row[name] for row in rows]).astype(np.int32))
    subprocess.run([python, "-c", TO_MDS, str(folder), str(folder / "mds"), *COLUMNS], check=True)
    return folder / "mds"


def run(python: str, program: str, folder: Path) -> dict[str, float]:
    """The figures of one process that reads a folder from the disk."""
    from rehearsal import forget

    forget(folder)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", program, str(folder), str(FIRST_ROWS), str(BATCH)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Make both, measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streaming", required=True, help="the Python that has mosaicml-streaming")
    parser.add_argument("--sequences", type=int, default=120_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    from measuring import show, show_processor

    show_processor()
    with tempfile.TemporaryDirectory() as name:
        packed = make_packs(Path(name), options.sequences)
        mds = make_mds(packed, Path(name), options.streaming)
        found = {"gaudi-bert": [], "streaming": []}
        for _ in range(options.rounds):
            found["gaudi-bert"].append(run(sys.executable, OURS, packed))
            found["streaming"].append(run(options.streaming, STREAMING, mds))
    for key, unit in {"seconds": "s", "megabytes": "MB", "rows": "rows/CPU s"}.items():
        print({"seconds": f"first {FIRST_ROWS} rows, cold", "rows": "the others"}.get(key, ""))
        for reader, figures in found.items():
            show(reader, [figure[key] for figure in figures], unit)
        ratios = [one[key] / other[key] for one, other in zip(*found.values(), strict=True)]
        show("gaudi-bert / streaming", ratios, "times")


if __name__ == "__main__":
    main()
