"""What a reader of many shards takes: bytes, seconds and memory to the first rows from a cold disk, and in the steady state.

    python benchmarks/reading.py first|steady|processes [--shards 32,320,3200] [--packs 800] [--rows N] [--rounds R]
                                 [--work FOLDER] [--before CHECKOUT] [--no-index] [--processes 3,8,32,48,64]

Folders of as many shards of equal size are made of the packs of the Wikipedia sample and kept in FOLDER. Each figure is of a
process of its own. `first` drops the folder from the page cache and reads 256 rows of `PackedDataset`; `steady` reads N rows
after the first 2,000, from the page cache and from a cold disk. CHECKOUT is the package of another commit, whose figures are
taken in turn. `processes` reads the epoch of some of so many processes, each from a cold disk: the bytes from the disk, in
those of its packs, and how many of the shards it reads, with 32 streams and with as many as its note on costs advises.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from measuring import show, show_processor

from gaudi_bert.artefacts.shards import index_path, write_index
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.sections import PackingSettings
from gaudi_bert.reading.global_order import GlobalOrder
from gaudi_bert.tfrecords.pack import pack
from gaudi_bert.tfrecords.packed_folder import read_metadata
from gaudi_bert.tfrecords.wire.framing import frame, read_records

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = Path(os.environ.get("GAUDI_BERT_SHARED", ROOT.parent / "shared")) / "data" / "wiki-sample" / "tfrecord-512"
GROUP_SHARDS = 32
FIRST_ROWS, WARM_UP_ROWS = 256, 2000

# What a process prints of itself, in its own words; it knows only what both commits have.
READ = """
import itertools, json, os, resource, sys, time
from gaudi_bert.pytorch import PackedDataset

def disk():
    return int(dict(line.split(": ") for line in open("/proc/self/io"))["read_bytes"])

folder, first, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
start = time.perf_counter()
for row in itertools.islice(PackedDataset(sys.argv[4]), 20):
    dict(row)
kernels = time.perf_counter() - start
bytes_before, start, cpu = disk(), time.perf_counter(), time.process_time()
dataset = PackedDataset(folder, seed=1)
opened = time.perf_counter()
read = iter(dataset)
for row in itertools.islice(read, first):
    dict(row)
took, cpu = time.perf_counter() - start, time.process_time() - cpu
mapped = {line.split()[-1] for line in open("/proc/self/maps") if ".tfrecord" in line}
result = {"open_seconds": opened - start, "first_seconds": took, "first_cpu_seconds": cpu, "kernel_seconds": kernels,
          "first_megabytes": (disk() - bytes_before) / 1e6, "files": len(os.listdir("/proc/self/fd")), "mapped": len(mapped)}
reader = getattr(dataset, "_reader", None)
waited, cpu, start = getattr(reader, "waited_seconds", 0.0), time.process_time(), time.perf_counter()
count = sum(1 for row in itertools.islice(read, rows))
wall = time.perf_counter() - start
if count:
    result |= {"rows_per_cpu_second": count / (time.process_time() - cpu), "rows_per_second": count / wall,
               "waited": (getattr(reader, "waited_seconds", 0.0) - waited) / wall}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
result |= {name: int(status[key].split()[0]) / 1024 for name, key in (("peak", "VmHWM"), ("anonymous", "RssAnon"))}
print(json.dumps(result))
"""

# The bytes that a process reads from the disk in its share of an epoch, and its packs.
READ_SHARE = """
import json, sys
from gaudi_bert.pytorch import PackedDataset

def disk():
    return int(dict(line.split(": ") for line in open("/proc/self/io"))["read_bytes"])

folder, rank, processes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for row in PackedDataset(sys.argv[4]):
    break
before, rows = disk(), sum(1 for _ in PackedDataset(folder, rank=rank, world_size=processes, seed=1))
print(json.dumps({"bytes": disk() - before, "rows": rows}))
"""

LABELS = {
    "first_megabytes": ("read from the disk to the first 256 rows", "MB", "<= 40"),
    "first_seconds": ("until the first 256 rows, after imports", "s", "<= 0.5"),
    "open_seconds": ("of it to open the folder", "s", ""),
    "first_cpu_seconds": ("the same in CPU time", "s", ""),
    "kernel_seconds": ("loading numba's kernels, for any data", "s", ""),
    "files": ("open files of the process then", "files", ""),
    "mapped": ("shards mapped then", "shards", ""),
    "rows_per_cpu_second": ("rows per second of CPU", "rows/s", ""),
    "rows_per_second": ("rows per second", "rows/s", ""),
    "waited": ("of the time waited for shards", "of it", ""),
    "peak": ("peak memory of the process", "MiB", ""),
    "anonymous": ("of it now, without mapped files", "MiB", ""),
}
OF_FIRST = (
    "first_megabytes",
    "first_seconds",
    "open_seconds",
    "first_cpu_seconds",
    "kernel_seconds",
    "files",
    "mapped",
    "peak",
    "anonymous",
)
OF_STEADY = ("rows_per_cpu_second", "rows_per_second", "waited", "peak", "anonymous")


def make_sample(work: Path) -> Path:
    """The packed sample of Wikipedia."""
    pack(SAMPLE, work / "sample", PackingSettings(), StageRun(Reporter(quiet=True)))
    return work / "sample"


def make_folder(folder: Path, shards: int, packs: int, index: bool) -> Path:
    """A packed folder of so many shards, each of so many packs of the sample, in groups of 32."""
    if (folder / "metadata.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    sample = make_sample(folder.parent)
    content = json.loads((sample / "metadata.json").read_text(encoding="utf-8"))
    frames = [frame(each) for path in sorted(sample.glob("*.tfrecord")) for each in read_records(path)]
    # One part of all shards, so that they are of equal size.
    chosen = list(itertools.islice(itertools.cycle(frames), packs))
    sizes = np.array([len(each) for each in chosen], np.uint32)
    for shard in range(shards):
        group, number = divmod(shard, GROUP_SHARDS)
        turned = shard % packs
        (folder / f"packed-{group:05d}-{number:05d}.tfrecord").write_bytes(b"".join(chosen[turned:] + chosen[:turned]))
    if index:
        for group in range(-(-shards // GROUP_SHARDS)):
            numbers = range(group * GROUP_SHARDS, min(shards, (group + 1) * GROUP_SHARDS))
            write_index(index_path(folder, group), [np.roll(sizes, -(shard % packs)) for shard in numbers])
    total = packs * shards
    content |= {
        "packs": total,
        "sequences": total,
        "tokens": total * 500,
        "padding_tokens": total * 12,
        "lower_bound": 1,
    }
    content |= {"efficiency": 500 / 512, "packing_factor": 1.0, "gap": total - 1}
    of_groups = [min(GROUP_SHARDS, shards - first) for first in range(0, shards, GROUP_SHARDS)]
    content["groups"] = [
        {"packs": [packs] * of_group, "bytes": [int(sizes.sum())] * of_group, "manifest_crc32c": 1} for of_group in of_groups
    ]
    (folder / "metadata.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def drop_from_page_cache(folder: Path) -> None:
    """Let the next process read the folder from the disk; the package stays where it is."""
    os.sync()
    for path in folder.iterdir():
        with open(path, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(checkout: Path, folder: Path, *numbers: int, program: str = READ) -> dict[str, Any]:
    """What a process of its own prints."""
    found = subprocess.run(
        [sys.executable, "-c", program, str(folder), *map(str, numbers), str(folder.parent / "sample")],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise SystemExit(f"{checkout}: {found.stderr.strip().splitlines()[-1]}")
    return json.loads(found.stdout)


def measure_processes(folder: Path, processes: int) -> None:
    """What some of so many processes read from the disk, and how many of the shards."""
    metadata = read_metadata(folder)
    sizes = metadata.shard_table.packs
    of_a_pack = metadata.shard_table.bytes.sum() / metadata.packs
    pages = []
    for rank in sorted({0, processes // 2, processes - 1}):
        drop_from_page_cache(folder)
        found = measure(ROOT, folder, rank, processes, program=READ_SHARE)
        pages.append(found["bytes"] / (found["rows"] * of_a_pack))
    show(f"{processes} processes: read from the disk, in bytes of the packs", pages, "times")
    for streams in sorted({32, -(-32 // processes) * processes}):
        visits = GlobalOrder(sizes, 1, streams=streams).visits(0, 0, 0, processes)
        share = len({visit.shard for visit in visits}) / len(sizes)
        show(f"{processes} processes, {streams} streams: of the shards, read by rank 0", [share], "of them")


def main() -> None:
    """Measure, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["first", "steady", "processes"])
    parser.add_argument("--shards", default="32,320,3200")
    parser.add_argument("--packs", type=int, default=800)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gaudi-bert-reading")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--no-index", action="store_true")
    parser.add_argument("--processes", default="3,8,32,48,64")
    options = parser.parse_args()
    show_processor()
    checkouts = {"now": ROOT} | ({"before": options.before} if options.before else {})
    for shards in map(int, options.shards.split(",")):
        name = f"{shards}-{options.packs}{'-walked' if options.no_index else ''}"
        folder = make_folder(options.work / name, shards, options.packs, not options.no_index)
        if options.what == "processes":
            print(f"{shards:,} shards of {options.packs:,} packs, cold disk")
            for processes in map(int, options.processes.split(",")):
                measure_processes(folder, processes)
            continue
        temperatures = ["cold"] if options.what == "first" else ["warm", "cold"]
        for checkout in checkouts.values():
            measure(checkout, folder, FIRST_ROWS, options.rows)  # kernels are compiled, pages are read
        figures: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for _ in range(options.rounds):
            for temperature, checkout in itertools.product(temperatures, checkouts):
                first, rows = (FIRST_ROWS, 0) if options.what == "first" else (WARM_UP_ROWS, options.rows)
                if temperature == "cold":
                    drop_from_page_cache(folder)
                found = measure(checkouts[checkout], folder, first, rows)
                for key in OF_FIRST if options.what == "first" else OF_STEADY:
                    figures[temperature, checkout][key].append(found[key])
        for (temperature, checkout), values in figures.items():
            print(f"{shards:,} shards of {options.packs:,} packs, {temperature} disk, {checkout}")
            for key, each in values.items():
                show(LABELS[key][0], each, *LABELS[key][1:])


if __name__ == "__main__":
    main()
