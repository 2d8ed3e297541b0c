"""What a trainer waits for and fetches until its first rows from a bucket, whose shards are not here.

    python benchmarks/reading_bucket.py [--shards 128] [--packs 3000] [--rows 256,4096] [--latency 0.03] [--rounds 3]
                                        [--work FOLDER] [--before CHECKOUT]

A folder of as many shards of equal size is made of the packs of the Wikipedia sample, kept in FOLDER, and put to an S3
server on loopback (moto), in front of which a proxy counts, and answers each request so many seconds later. A process of
its own opens the bucket and reads batches of 16 packs as one trainer does: seconds after imports, requests, and bytes that
were sent. CHECKOUT is the package of another commit, whose figures are taken in turn. The server reads a whole object to
answer for a part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measuring import show, show_processor  # noqa: E402
from reading import make_folder  # noqa: E402

from gaudi_bert.artefacts.store.objects import Objects  # noqa: E402
from tests.builders.faulty_proxy import FaultyProxy, faulty_proxy  # noqa: E402
from tests.builders.s3_server import ENVIRONMENT, quick, s3_server, upload  # noqa: E402

BATCH = 16

# What a process runs: URL ENDPOINT, and numbers of rows. It says when it has read so many, and goes on when it is told to.
READ = f"""
import itertools, json, sys, time
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.input.batches import TrainingOrder, training_batches, value_limits
from gaudi_bert.training.stored_inputs import open_data

url, endpoint, *marks = sys.argv[1:]
started, done = time.perf_counter(), 0
with open_data(url, StoreSettings(endpoint_url=endpoint)) as source:
    limits = value_limits(source, BertConfig(vocab_size=30522, max_position_embeddings=512))
    batches = training_batches(source, limits, {BATCH}, TrainingOrder(7, 4096))
    for mark in map(int, marks):
        for _ in itertools.repeat(None, (mark - done) // {BATCH}):
            next(batches)
        done = mark
        print(json.dumps({{"seconds": time.perf_counter() - started}}), flush=True)
        sys.stdin.readline()
    batches.close()
"""


def measure(checkout: Path, proxy: FaultyProxy, marks: list[str]) -> list[dict[str, float]]:
    """The figures of one process at each of the numbers of rows."""
    sent, requests, found = proxy.sent, proxy.requests.total(), []
    with tempfile.TemporaryDirectory() as scratch:
        process = subprocess.Popen(
            [sys.executable, "-c", READ, "s3://bucket/packed", proxy.endpoint, *marks],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "TMPDIR": scratch},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in marks:
            figures = json.loads(process.stdout.readline())
            figures |= {"megabytes": (proxy.sent - sent) / 1e6, "requests": proxy.requests.total() - requests}
            found.append(figures)
            process.stdin.write("\n")
            process.stdin.flush()
        process.communicate()
    return found


def main() -> None:
    """Measure, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=128)
    parser.add_argument("--packs", type=int, default=3000)
    parser.add_argument("--rows", default="256,4096")
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gaudi-bert-reading")
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    show_processor()
    checkouts = {"now": ROOT} | ({"before": options.before} if options.before else {})
    folder = make_folder(options.work / f"{options.shards}-{options.packs}", options.shards, options.packs, index=True)
    os.environ.update(ENVIRONMENT)
    found: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    with s3_server() as server, faulty_proxy(server.port, slow_seconds=options.latency) as proxy:
        server.make_bucket("bucket")
        upload(folder, "s3://bucket/packed", Objects(quick(server.endpoint)))
        for checkout in checkouts.values():
            measure(checkout, proxy, [f"{BATCH}"])  # kernels are compiled
        proxy.faults, proxy.share = ("slow",), 1.0
        for _ in range(options.rounds):
            for name, checkout in checkouts.items():
                found[name].append(measure(checkout, proxy, options.rows.split(",")))
    size = (folder / "packed-00000-00000.tfrecord").stat().st_size / 1e6
    print(f"{options.shards} shards of {size:.1f} MB, each request {options.latency} s late, one process")
    for number, rows in enumerate(options.rows.split(",")):
        for name, rounds in found.items():
            for key, unit in (("seconds", "s"), ("megabytes", "MB"), ("requests", "requests")):
                show(f"first {rows} rows, {name}: {key}", [each[number][key] for each in rounds], unit)


if __name__ == "__main__":
    main()
