"""Reading packs beside MosaicML's streaming: the same packs as MDS, from a cold disk and in the steady state.

    python -m venv /tmp/streaming && /tmp/streaming/bin/pip install mosaicml-streaming
    python benchmarks/reading_streaming.py --streaming /tmp/streaming/bin/python [--sequences 120000] [--rounds 5]

Both give rows of 512 in a seeded order, without workers, in batches of 16. MDS holds each column in the smallest type that
it has for its values, and decodes all columns of a row; ours decodes all of them too, or, in a process of its own,
`input_ids` alone. A round is a process of each, alternating: the first 256 rows with the packs out of the page cache
(seconds after imports, bytes from the disk), then all others. The same first rows from an S3 server on loopback:
seconds, and bytes that came to this disk; ours are the trainer's input. The server is moto's, which `scripts/s3-server.sh`
puts into `.venv/s3-server`; without it that part is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FIRST_ROWS, BATCH = 256, 16
COLUMNS = {
    "input_ids": "int16",
    "token_type_ids": "uint8",
    "position_ids": "int16",
    "sequence_ids": "uint8",
    "labels": "int16",
}
"""Columns, and the smallest types for their values: token ids are below 30,522, labels -100 where there is none."""

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
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.pytorch import PackedDataset
def rows():
    for row in PackedDataset(folder, batch_packs=batch):
        yield {{name: row[name] for name in sys.argv[4:]}}
measure(rows)
"""
STREAMING = f"""{MEASURE}
from streaming import StreamingDataset
measure(lambda: StreamingDataset(local=folder, shuffle=True, batch_size=batch))
"""
# From a bucket: URL FIRST_ROWS BATCH ENDPOINT; what comes down lies in TMPDIR.
MEASURE_STORE = """
import json, os, sys, time
from pathlib import Path
url, first_rows, batch, endpoint = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def measure(items, of_each):
    started = time.perf_counter()
    for _ in range(first_rows // of_each):
        next(items)
    seconds = time.perf_counter() - started
    there = sum(512 * path.stat().st_blocks for path in Path(os.environ["TMPDIR"]).rglob("*") if path.is_file())
    print(json.dumps({"seconds": seconds, "megabytes": there / 1e6}), flush=True)
    os._exit(0)
"""
OURS_STORE = f"""{MEASURE_STORE}

from gaudi_bert.config.places import StoreSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.input.source import open_data
from gaudi_bert.training.input.batches import TrainingOrder, value_limits, training_batches
def batches():
    with open_data(url, StoreSettings(endpoint_url=endpoint)) as source:
        limits = value_limits(source, BertConfig(vocab_size=30522, max_position_embeddings=512))
        yield from training_batches(source, limits, batch, TrainingOrder(7, 4096))
measure(batches(), batch)
"""
STREAMING_STORE = f"""{MEASURE_STORE}
os.environ["S3_ENDPOINT_URL"] = endpoint
from streaming import StreamingDataset
def rows():
    yield from StreamingDataset(remote=url, local=os.environ["TMPDIR"] + "/mds", shuffle=True, batch_size=batch)
measure(rows(), 1)
"""
TO_MDS = """
import sys, numpy
from streaming import MDSWriter
folder, out, *names = sys.argv[1:]
columns = {name: numpy.load(f"{folder}/{name}.npy", mmap_mode="r") for name in names}
kinds = {name: f"ndarray:{values.dtype}:{values.shape[1]}" for name, values in columns.items()}
with MDSWriter(out=out, columns=kinds) as writer:
    for number in range(len(columns[names[0]])):
        writer.write({name: numpy.ascontiguousarray(values[number]) for name, values in columns.items()})
"""


def make_packs(folder: Path, sequences: int) -> Path:
    """Packs of random sequences with the lengths of Wikipedia."""
    from rehearsal import make_records

    from gaudi_bert.artefacts.stage_run import StageRun
    from gaudi_bert.common.progress import Reporter
    from gaudi_bert.config.sections import PackingSettings
    from gaudi_bert.tfrecords.pack import pack

    make_records(folder / "records", sequences)
    pack(folder / "records", folder / "packed", PackingSettings(), StageRun(Reporter(quiet=True)))
    return folder / "packed"


def make_mds(packed: Path, folder: Path, python: str) -> Path:
    """The same packs as MDS, in the smallest types."""
    from gaudi_bert.pytorch import PackedDataset

    rows = list(PackedDataset(packed))
    for name, kind in COLUMNS.items():
        values = np.stack([row[name] for row in rows])
        np.save(folder / f"{name}.npy", values.astype(kind))
        assert (values == values.astype(kind)).all(), f"{name} does not fit {kind}"
    subprocess.run([python, "-c", TO_MDS, str(folder), str(folder / "mds"), *COLUMNS], check=True)
    return folder / "mds"


def run(python: str, program: str, folder: Path | str, *more: str, **environment: str) -> dict[str, float]:
    """The figures of one process that reads a folder from the disk, or a bucket."""
    from rehearsal import forget

    if isinstance(folder, Path):
        forget(folder)
    variables = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [python, "-c", program, str(folder), str(FIRST_ROWS), str(BATCH), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=variables | environment)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def from_disk(python: str, packed: Path, mds: Path, rounds: int) -> None:
    """Both from a cold disk, and then to the end."""
    found: dict[str, list] = {"gaudi-bert": [], "gaudi-bert, one column": [], "streaming": []}
    for _ in range(rounds):
        found["gaudi-bert"].append(run(sys.executable, OURS, packed, *COLUMNS))
        found["gaudi-bert, one column"].append(run(sys.executable, OURS, packed, "input_ids"))
        found["streaming"].append(run(python, STREAMING, mds))
    compare(found, {"seconds": "s", "megabytes": "MB"}, f"first {FIRST_ROWS} rows, cold disk")
    compare(found, {"rows": "rows/CPU s"}, "the others")


def from_bucket(python: str, packed: Path, mds: Path, rounds: int) -> None:
    """Both from a bucket, nothing of it here."""
    from gaudi_bert.artefacts.store.objects import Objects
    from tests.builders.s3_server import ENVIRONMENT, PYTHON, quick, s3_server, upload

    if not PYTHON.exists():
        print(f"from a bucket: left out, there is no S3 server ({PYTHON}); run scripts/s3-server.sh")
        return
    found: dict[str, list] = {"gaudi-bert": [], "streaming": []}
    os.environ.update(ENVIRONMENT)
    with s3_server() as server:
        server.make_bucket("bucket")
        objects = Objects(quick(server.endpoint))
        upload(packed, "s3://bucket/packed", objects)
        upload(mds, "s3://bucket/mds", objects)
        programs = {"gaudi-bert": (sys.executable, OURS_STORE, "packed"), "streaming": (python, STREAMING_STORE, "mds")}
        for _ in range(rounds):
            for name, (interpreter, program, folder) in programs.items():
                with tempfile.TemporaryDirectory() as scratch:
                    url = f"s3://bucket/{folder}"
                    found[name].append(run(interpreter, program, url, server.endpoint, TMPDIR=scratch, **ENVIRONMENT))
    compare(found, {"seconds": "s", "megabytes": "MB"}, f"first {FIRST_ROWS} rows, S3 on loopback")


def compare(found: dict[str, list], units: dict[str, str], title: str) -> None:
    """Median and range of each figure of both, and of their ratio in each round."""
    from measuring import show

    for key, unit in units.items():
        for reader, figures in found.items():
            show(f"{title}: {reader}, {unit}", [figure[key] for figure in figures], unit)
            if reader != "streaming":
                ratios = [ours[key] / other[key] for ours, other in zip(figures, found["streaming"], strict=True)]
                show(f"{title}: {reader} / streaming, {unit}", ratios, "times")


def main() -> None:
    """Make both, measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streaming", required=True, help="the Python that has mosaicml-streaming")
    parser.add_argument("--sequences", type=int, default=120_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    from measuring import show_processor

    show_processor()
    with tempfile.TemporaryDirectory() as name:
        packed = make_packs(Path(name), options.sequences)
        mds = make_mds(packed, Path(name), options.streaming)
        for part in (from_disk, from_bucket):
            part(options.streaming, packed, mds, options.rounds)


if __name__ == "__main__":
    main()
