"""Measure reading packs from many shards: from a cold disk, with many processes, compared with MosaicML's streaming, and how
evenly topics are mixed.

    python benchmarks/reading.py first|processes [--shards 32,320,3200]
    python -m venv /tmp/streaming && /tmp/streaming/bin/pip install mosaicml-streaming
    python benchmarks/reading.py streaming --streaming /tmp/streaming/bin/python [--sequences 120000]
    python benchmarks/reading.py topics

Each reader is a process of its own. The readers run in turn, --rounds times. A cold disk means that the files of the folder
were dropped from the page cache.

`first` and `processes` use folders with different numbers of shards of equal size, which contain packs of the Wikipedia
sample and are kept in --work. `first` measures the bytes, seconds and memory until `PackedDataset` has returned 256 rows.
`processes` measures for 3 to 64 processes how many bytes some of them read in an epoch, relative to the size of their packs,
and which fraction of the shards a process reads, with 32 streams and with the recommended number of streams.

`streaming` converts the same packs to MDS, with the smallest type for the values of each column. Both programs return rows
of 512 in a seeded order, without workers, in batches of 16, from a cold disk. The first 256 rows and all other rows are
measured separately. MDS decodes all columns of a row. gaudi-bert also decodes all columns or, in a separate process, only
`input_ids`.

`topics` simulates reading and reads no files. The packs are in groups of 32 shards with 7,656 packs each, each group has one
topic, and the groups are sorted by topic. 33 groups correspond to Wikipedia. For windows of packs at random positions, the
figure is the root mean square error of the topic proportions, divided by the error of independent draws, so that 1
corresponds to a uniform shuffle. py1e is implemented from the description of MosaicML's streaming for one node: the shards
are permuted, and each sample is moved by up to half a block of 4,000,000 samples.
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
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from measuring import print_figure, print_processor  # noqa: E402
from rehearsal import drop_from_page_cache, make_records  # noqa: E402

from gaudi_bert.artefacts.packed import RecordMetadata  # noqa: E402
from gaudi_bert.artefacts.results import StageRun  # noqa: E402
from gaudi_bert.artefacts.shards import index_path, write_index  # noqa: E402
from gaudi_bert.common.arrays import IntArray  # noqa: E402
from gaudi_bert.common.progress import Reporter  # noqa: E402
from gaudi_bert.config.sections import PackingSettings  # noqa: E402
from gaudi_bert.reading.global_order import GlobalOrder  # noqa: E402
from gaudi_bert.tfrecords.wire.framing import frame, read_records  # noqa: E402
from gaudi_bert.tfrecords.write import pack_records  # noqa: E402

SAMPLE = Path(os.environ.get("GAUDI_BERT_SHARED", ROOT.parent / "shared")) / "data" / "wiki-sample" / "tfrecord-512"
RUN = StageRun(Reporter(quiet=True))
GROUP_SHARDS, SHARD_PACKS, FIRST_ROWS = 32, 800, 256
PROCESSES = (3, 8, 32, 48, 64)

# The program of a reader. Its arguments are FOLDER SAMPLE FIRST MOST RANK PROCESSES COLUMN... (MOST 0: all rows of the
# process). It first reads the sample, so that no compilation or loading is measured.
MEASURE = """
import itertools, json, sys, time
from pathlib import Path

def disk():
    return int(dict(line.split(": ") for line in open("/proc/self/io"))["read_bytes"]) / 1e6

def measure(open_rows, first):
    read, started = disk(), time.perf_counter()
    rows = iter(open_rows())
    for _ in range(first):
        next(rows)
    result = {"seconds": time.perf_counter() - started, "megabytes": disk() - read}
    cpu, count = time.process_time(), sum(1 for _ in rows)
    result |= {"rows": count / (max(time.process_time() - cpu, 1e-9)), "count": count, "all megabytes": disk() - read}
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(json.dumps(result | {"peak": int(status["VmHWM"].split()[0]) / 1024}))
"""
OURS = f"""{MEASURE}
from gaudi_bert.pytorch import PackedDataset
folder, sample, first, most, rank, processes, *names = sys.argv[1:]
def rows(folder, **shared):
    return ({{name: row[name] for name in names or row}} for row in PackedDataset(folder, seed=1, batch_packs=16, **shared))
sum(1 for _ in itertools.islice(rows(sample), 20))
def open_rows():
    return itertools.islice(rows(folder, rank=int(rank), world_size=int(processes)), int(most) or None)
measure(open_rows, int(first))
"""
STREAMING = f"""{MEASURE}
from streaming import StreamingDataset
measure(lambda: StreamingDataset(local=sys.argv[1], shuffle=True, batch_size=16), int(sys.argv[3]))
"""
COLUMNS = {
    "input_ids": "int16",
    "token_type_ids": "uint8",
    "position_ids": "int16",
    "sequence_ids": "uint8",
    "labels": "int16",
}
"""The smallest type for the values of each column. Token ids are below 30,522, and labels are -100 for ignored positions."""
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
LABELS = {
    "seconds": (f"until the first {FIRST_ROWS} rows, after imports and kernels", "s"),
    "megabytes": (f"read from the disk to the first {FIRST_ROWS} rows", "MB"),
    "peak": ("peak memory of the process", "MiB"),
    "rows": ("the others, of CPU", "rows/s"),
}


def measure(
    folder: Path, sample: Path, *more: object, python: str = sys.executable, program: str = OURS
) -> dict[str, float]:
    """Run a process that reads a folder from a cold disk, and return its figures."""
    drop_from_page_cache(folder)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [python, "-c", program, *map(str, (folder, sample, *more))]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


# --- first, processes: folders of many shards


def make_sample(work: Path) -> Path:
    """Pack the Wikipedia sample, and return the packed folder."""
    pack_records(SAMPLE, work / "sample", PackingSettings(), RUN)
    return work / "sample"


def make_folder(folder: Path, shards: int, sample: Path) -> Path:
    """Write a packed folder with the given number of shards, in groups of 32, from the packs of the sample."""
    if (folder / "metadata.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads((sample / "metadata.json").read_text(encoding="utf-8"))
    frames = [frame(each) for path in sorted(sample.glob("*.tfrecord")) for each in read_records(path)]
    # Use the same packs in all shards, so that the shards have equal size.
    chosen = list(itertools.islice(itertools.cycle(frames), SHARD_PACKS))
    entries = np.array([(len(each), int.from_bytes(each[-4:], "little")) for each in chosen], np.uint32)
    total = SHARD_PACKS * shards
    for shard in range(shards):
        group, number = divmod(shard, GROUP_SHARDS)
        turned = shard % SHARD_PACKS
        (folder / f"packed-{group:05d}-{number:05d}.tfrecord").write_bytes(b"".join(chosen[turned:] + chosen[:turned]))
    of_groups = [min(GROUP_SHARDS, shards - first) for first in range(0, shards, GROUP_SHARDS)]
    for group, of_group in enumerate(of_groups):
        numbers = range(group * GROUP_SHARDS, group * GROUP_SHARDS + of_group)
        write_index(index_path(folder, group), [np.roll(entries, -(shard % SHARD_PACKS), axis=0) for shard in numbers])
    content |= {"packs": total, "sequences": total, "tokens": total * 500, "padding_tokens": total * 12, "lower_bound": 1}
    content |= {"efficiency": 500 / 512, "packing_factor": 1.0, "gap": total - 1}
    content["groups"] = [
        {"packs": [SHARD_PACKS] * of_group, "bytes": [int(entries[:, 0].sum())] * of_group, "manifest_crc32c": 1}
        for of_group in of_groups
    ]
    (folder / "metadata.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def measure_first(folder: Path, sample: Path, rounds: int) -> None:
    """Measure how long it takes and what is read until the first rows are available."""
    found = [measure(folder, sample, FIRST_ROWS, FIRST_ROWS, 0, 1) for _ in range(rounds)]
    for key in ("seconds", "megabytes", "peak"):
        print_figure(LABELS[key][0], [each[key] for each in found], LABELS[key][1])


def measure_processes(folder: Path, sample: Path) -> None:
    """Measure what some of the processes read from the disk, and which fraction of the shards."""
    metadata = RecordMetadata.read(folder)
    sizes = metadata.shard_table.packs
    of_a_pack = metadata.shard_table.bytes.sum() / metadata.packs / 1e6
    for processes in PROCESSES:
        ranks = sorted({0, processes // 2, processes - 1})
        found = [measure(folder, sample, 0, 0, rank, processes) for rank in ranks]
        shares = [each["all megabytes"] / (each["count"] * of_a_pack) for each in found]
        print_figure(f"{processes} processes: read from the disk, in bytes of the packs", shares, "times")
        for streams in sorted({32, -(-32 // processes) * processes}):
            visits = GlobalOrder(sizes, 1, streams=streams).iterate_shard_visits(0, 0, 0, processes)
            share = len({visit.shard for epoch, visit in visits if epoch == 0}) / len(sizes)
            print_figure(f"{processes} processes, {streams} streams: of the shards, read by rank 0", [share], "of them")


# --- streaming: the same packs as MDS


def make_mds(packed: Path, folder: Path, python: str) -> Path:
    """Write the packs as MDS with the smallest types, and return the folder."""
    from gaudi_bert.pytorch import PackedDataset

    rows = list(PackedDataset(packed))
    for name, kind in COLUMNS.items():
        values = np.stack([row[name] for row in rows])
        np.save(folder / f"{name}.npy", values.astype(kind))
        assert (values == values.astype(kind)).all(), f"{name} does not fit {kind}"
    subprocess.run([python, "-c", TO_MDS, str(folder), str(folder / "mds"), *COLUMNS], check=True)
    return folder / "mds"


def compare_streaming(python: str, sequences: int, rounds: int) -> None:
    """Compare both readers from a cold disk to the end of the data. Print the median and range of each figure, and of the
    ratio in each round.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, packed = Path(name), Path(name) / "packed"
        make_records(folder / "records", sequences)
        pack_records(folder / "records", packed, PackingSettings(), RUN)
        mds, found = make_mds(packed, folder, python), defaultdict(list)
        for _ in range(rounds):
            found["gaudi-bert"].append(measure(packed, packed, FIRST_ROWS, 0, 0, 1, *COLUMNS))
            found["gaudi-bert, one column"].append(measure(packed, packed, FIRST_ROWS, 0, 0, 1, "input_ids"))
            found["streaming"].append(measure(mds, mds, FIRST_ROWS, python=python, program=STREAMING))
    for key, (label, unit) in LABELS.items():
        for reader, figures in found.items():
            print_figure(f"{label}: {reader}", [figure[key] for figure in figures], unit)
            if reader != "streaming":
                ratios = [ours[key] / other[key] for ours, other in zip(figures, found["streaming"], strict=True)]
                print_figure(f"{label}: {reader} / streaming", ratios, "times")


# --- topics: how evenly the packs of a sorted input are mixed

TOPIC_PACKS, BLOCK = 7656, 4_000_000
WINDOWS = (256, 2048, 16384, 65536)
TopicsOf = Callable[[int, int], IntArray]
"""A function (first pack, number of packs) that returns the topics of consecutive packs in reading order."""


def locate_topics_in_our_order(topics: IntArray, epoch: int, streams: int = 32) -> TopicsOf:
    """Return the topics in gaudi-bert's reading order. With 512 streams, about as many shards are open as in a block of
    py1e.
    """
    regions = np.repeat(np.arange(len(topics)), GROUP_SHARDS)
    order = GlobalOrder(np.full(len(regions), TOPIC_PACKS), 1, streams=streams, regions=regions)
    return lambda first, packs: topics[regions[order.locate_packs(epoch, np.arange(first, first + packs)).shards]]


def draw_topics_in_py1e_order(topics: IntArray, random: np.random.Generator) -> IntArray:
    """Return the topics of the 6,000,000 packs in the middle of an epoch, or of all packs of a shorter epoch."""
    shards = random.permutation(len(topics) * GROUP_SHARDS)[: 4 * BLOCK // TOPIC_PACKS]
    moved = (
        np.arange(len(shards) * TOPIC_PACKS) + random.uniform(-1, 1, len(shards) * TOPIC_PACKS) * (BLOCK - TOPIC_PACKS) / 2
    )
    of_packs = np.repeat(topics[shards // GROUP_SHARDS].astype(np.int16), TOPIC_PACKS)
    middle = (moved > BLOCK) & (moved < 2.5 * BLOCK) if len(moved) > 3 * BLOCK else np.ones(len(moved), bool)
    return of_packs[middle][np.argsort(moved[middle])]


def measure_topic_errors(
    read: TopicsOf, packs: int, shares: np.ndarray, windows: int, random: np.random.Generator
) -> list[float]:
    """Return the error of the topic proportions for each window size, relative to the error of independent draws."""
    figures = []
    for size in WINDOWS:
        errors = []
        for first in random.integers(0, packs - size, windows).tolist():
            errors.append(((np.bincount(read(first, size), minlength=len(shares)) / size - shares) ** 2).sum())
        figures.append(float(np.sqrt(np.mean(errors) / ((shares * (1 - shares)).sum() / size))))
    return figures


def measure_topics(windows: int, epochs: int) -> None:
    """Print the figures of each reading order over several epochs."""
    for groups, count in ((33, 22), (2000, 22), (2000, 40), (2000, 200)):
        topics, found = np.arange(groups) * count // groups, defaultdict(list)
        shares, packs = np.bincount(topics) / groups, groups * GROUP_SHARDS * TOPIC_PACKS
        for epoch in range(epochs):
            random = np.random.default_rng(groups + epoch)
            shuffled = draw_topics_in_py1e_order(topics, random)
            ways: dict[str, tuple[TopicsOf, int]] = {
                "our order": (locate_topics_in_our_order(topics, epoch), packs),
                "our order, 512 streams": (locate_topics_in_our_order(topics, epoch, streams=512), packs),
                "py1e, one node": (lambda first, size, all_=shuffled: all_[first : first + size], len(shuffled)),
            }
            for name, (read, most) in ways.items():
                found[name].append(measure_topic_errors(read, most, shares, windows, random))
        for name, figures in found.items():
            for size, values in zip(WINDOWS, zip(*figures, strict=True), strict=True):
                print_figure(f"{groups:,} groups, {count} topics, windows of {size:,}: {name}", values, "times")


def main() -> None:
    """Parse the command line, and measure the selected property."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["first", "processes", "streaming", "topics"])
    parser.add_argument("--shards", default="32,320,3200")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; for `topics`: number of epochs")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gaudi-bert-reading")
    parser.add_argument("--streaming", help="Python executable with mosaicml-streaming")
    parser.add_argument("--sequences", type=int, default=120_000, help="number of sequences for `streaming`")
    parser.add_argument("--windows", type=int, default=400, help="number of windows for `topics`")
    options = parser.parse_args()
    print_processor()
    if options.what == "topics":
        measure_topics(options.windows, options.rounds)
    elif options.what == "streaming":
        if options.streaming is None:
            parser.error("streaming needs --streaming PYTHON")
        compare_streaming(options.streaming, options.sequences, options.rounds)
    else:
        sample = make_sample(options.work)
        for shards in map(int, options.shards.split(",")):
            folder = make_folder(options.work / f"{shards}-{SHARD_PACKS}", shards, sample)
            print(f"{shards:,} shards of {SHARD_PACKS:,} packs, cold disk")
            if options.what == "first":
                measure_first(folder, sample, options.rounds)
            else:
                measure_processes(folder, sample)


if __name__ == "__main__":
    main()
