"""What a trainer waits for and fetches until its first rows from a bucket, whose shards are not here.

    python benchmarks/reading_bucket.py [--shards 64] [--packs 8000] [--rows 256,2048] [--rounds 3] [--work FOLDER]
                                        [--latency 0.03] [--megabytes 125] [--before CHECKOUT]

A folder of as many shards of equal size is made of the packs of the Wikipedia sample and kept in FOLDER. A server of S3's
two requests to read serves it as a bucket; it answers so many seconds late and sends so many megabytes a second in all
(moto, which the tests use, reads a whole object for a part of it). A process of its own opens the bucket and reads batches
of 16 packs as one trainer does: seconds after imports, CPU time, requests, and bytes that were sent. CHECKOUT is the package
of another commit, whose figures are taken in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measuring import show, show_processor  # noqa: E402
from reading import make_folder  # noqa: E402

BATCH, PIECE_BYTES = 16, 1 << 18

# What a process runs: URL ENDPOINT, and numbers of rows. It says when it has read so many, and goes on when it is told to.
READ = f"""
import itertools, json, sys, time
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.model.config import BertConfig
from gaudi_bert.training.input.batches import TrainingOrder, training_batches, value_limits
from gaudi_bert.training.input.source import open_data

url, endpoint, *marks = sys.argv[1:]
started, cpu, done = time.perf_counter(), time.process_time(), 0
with open_data(url, StoreSettings(endpoint_url=endpoint)) as source:
    limits = value_limits(source, BertConfig(vocab_size=30522, max_position_embeddings=512))
    batches = training_batches(source, limits, {BATCH}, TrainingOrder(7, 4096))
    for mark in map(int, marks):
        for _ in itertools.repeat(None, (mark - done) // {BATCH}):
            next(batches)
        done = mark
        print(json.dumps({{"s": time.perf_counter() - started, "CPU s": time.process_time() - cpu}}), flush=True)
        sys.stdin.readline()
    batches.close()
"""


class BucketServer(ThreadingHTTPServer):
    """The files of a folder as the objects of a bucket; what it sent is counted."""

    daemon_threads = True

    def __init__(self, folder: Path, latency: float, bytes_a_second: float) -> None:
        super().__init__(("127.0.0.1", 0), _Object)
        self.folder, self.latency, self.bytes_a_second = folder, latency, bytes_a_second
        self.sent, self.requests = 0, 0
        self._lock, self._free_at = threading.Lock(), 0.0

    def pass_on(self, size: int) -> None:
        """Wait until the network has sent so many bytes."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + size / self.bytes_a_second
            self.sent += size
            wait = self._free_at - time.perf_counter()
        time.sleep(max(0.0, wait))


class _Object(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: BucketServer

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, is_head: bool) -> None:
        self.server.requests += 1
        time.sleep(self.server.latency)
        path = self.server.folder / self.path.split("?")[0].rsplit("/", 1)[-1]
        size = path.stat().st_size if path.exists() else 0
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        begin, end = (int(part[1]), min(int(part[2] or size), size - 1) + 1) if part else (0, size)
        self.send_response_only(404 if not path.exists() else 206 if part else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("ETag", f'"{size}"')
        self.send_header("Last-Modified", self.date_time_string(0))
        self.end_headers()
        if not is_head and path.exists():
            with path.open("rb") as handle, suppress(OSError):
                handle.seek(begin)
                for first in range(begin, end, PIECE_BYTES):
                    piece = handle.read(min(PIECE_BYTES, end - first))
                    self.server.pass_on(len(piece))
                    self.wfile.write(piece)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def measure(checkout: Path, server: BucketServer, marks: list[str]) -> list[dict[str, float]]:
    """The figures of one process at each of the numbers of rows."""
    sent, requests, found = server.sent, server.requests, []
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "eu-west-1"}
    with tempfile.TemporaryDirectory() as scratch:
        process = subprocess.Popen(
            [sys.executable, "-c", READ, "s3://bucket/packed", f"http://127.0.0.1:{server.server_port}", *marks],
            cwd=checkout,
            env={**os.environ, **keys, "PYTHONPATH": str(checkout), "TMPDIR": scratch},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in marks:
            figures = json.loads(process.stdout.readline())
            figures |= {"MB": (server.sent - sent) / 1e6, "requests": server.requests - requests}
            found.append(figures)
            process.stdin.write("\n")
            process.stdin.flush()
        process.communicate()
    return found


def main() -> None:
    """Measure, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--packs", type=int, default=8000)
    parser.add_argument("--rows", default="256,2048")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--megabytes", type=float, default=125)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gaudi-bert-reading")
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    show_processor()
    checkouts = {"now": ROOT} | ({"before": options.before} if options.before else {})
    folder = make_folder(options.work / f"{options.shards}-{options.packs}", options.shards, options.packs, index=True)
    server = BucketServer(folder, options.latency, options.megabytes * 1e6)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    for checkout in checkouts.values():
        measure(checkout, server, [f"{BATCH}"])  # kernels are compiled
    for _ in range(options.rounds):
        for name, checkout in checkouts.items():
            found[name].append(measure(checkout, server, options.rows.split(",")))
    size = (folder / "packed-00000-00000.tfrecord").stat().st_size / 1e6
    print(f"{options.shards} shards of {size:.1f} MB, answers {options.latency} s late, {options.megabytes:g} MB/s")
    for number, rows in enumerate(options.rows.split(",")):
        for name, rounds in found.items():
            for unit in rounds[0][number]:
                show(f"first {rows} rows, {name}, {unit}", [each[number][unit] for each in rounds], unit)


if __name__ == "__main__":
    main()
