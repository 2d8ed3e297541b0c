"""Measure the speed and the memory of packing records, compared with a stand-in for Habana's packing script and with `cp`.

    python benchmarks/records.py [--folder DIR] [--rounds N] [--only passes,job,memory,processes,groups]

The data are 8 files of 20,000 unpacked examples (400 MB), whose lengths are drawn from the histogram wikipedia-512 with a
fixed seed. The compared programs run in turn in one process, round by round. The benchmark prints the medians and ranges.
Ratios of CPU time per record should not get worse, whereas elapsed times depend on what else the machine is doing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import measure_seconds, print_figure
from predecessor import read_records_by_length, write_packs
from records_data import FILES, LENGTH, MAX_PREDICTIONS, QUIET, SEED, SEQUENCES_PER_FILE, write_records_and_plan
from records_scaling import measure_groups, measure_memory, measure_processes

from gaudi_bert.artefacts.results import StageRun
from gaudi_bert.common.files import exclusive_lock

PREDECESSOR_RECORDS, PREDECESSOR_PACKS = 3000, 1000


def main() -> None:
    """Parse the command line, and run the selected parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "gaudi-bert-bench-records")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="passes,job,memory,processes,groups")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[Path, int], None]] = {
        "passes": compare_passes,
        "job": compare_job,
        "memory": measure_memory,
        "processes": measure_processes,
        "groups": measure_groups,
    }
    with exclusive_lock(arguments.folder / "benchmark", f"{arguments.folder}: benchmark"):
        for name in arguments.only.split(","):
            print(f"\n{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}", end="")
            parts[name](arguments.folder, arguments.rounds)


class Predecessor:
    """The two passes of the stand-in for Habana's script, applied to a sample of the records."""

    def __init__(self, records: Path, folder: Path, packs: Sequence[Sequence[bytes]]) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow

        self.tensorflow, self.file, self.out = tensorflow, sorted(records.iterdir())[0], folder / "predecessor"
        self.packs = [[tensorflow.constant(payload) for payload in pack] for pack in packs]
        self.sequences = sum(len(pack) for pack in packs)

    def histogram(self) -> tuple[float, float]:
        """Return the CPU and elapsed seconds per record of the first pass."""
        cpu, wall = measure_seconds(lambda: read_records_by_length(self.tensorflow, self.file, PREDECESSOR_RECORDS))
        return cpu / PREDECESSOR_RECORDS, wall / PREDECESSOR_RECORDS

    def pack(self) -> tuple[float, float]:
        """Return the CPU and elapsed seconds per record of the second pass."""
        cpu, wall = measure_seconds(lambda: write_packs(self.tensorflow, self.packs, self.out, LENGTH, MAX_PREDICTIONS))
        return cpu / self.sequences, wall / self.sequences


class Engine:
    """The passes of gaudi-bert over one group, in one thread."""

    def __init__(self, records: Path, planned: Path) -> None:
        from gaudi_bert.artefacts.plan import WritablePlan
        from gaudi_bert.common.sampling import sample_packs
        from gaudi_bert.tfrecords.packed_shards import PackEncoder
        from gaudi_bert.tfrecords.scan import IndexedSequences, list_record_files
        from gaudi_bert.tfrecords.wire.schema import PackedSchema
        from gaudi_bert.tfrecords.write import _match_planned_files, _read_group_into_memory

        self.plan = WritablePlan.read(planned)
        self.schema = PackedSchema.from_sizes(self.plan)
        self.unpacked_schema = self.schema.unpacked_schema
        matched = _match_planned_files(records, list_record_files(records), self.plan)
        files = self.plan.groups[0].files
        self.files = [matched[file.name] for file in files]
        room = lambda size: np.zeros(size, np.uint8)  # noqa: E731
        self.group = _read_group_into_memory(self.files, files, self.unpacked_schema, room, 1, lambda _bytes: None)
        dealt = sample_packs(self.group.lengths, self.plan.groups[0].strategies, SEED, 0)
        self.assignment, self.packs = dealt, dealt.starts.size - 1
        self.encoder = PackEncoder(self.schema, self.group, dealt)
        self.out = self.encoder.allocate_output_buffer()
        self.record_index = np.zeros((self.packs, 2), np.uint32)
        self.raw = [np.fromfile(path, np.uint8) for path in self.files]
        rows = IndexedSequences.empty(self.group.buffer, max(file.sequences for file in files)).rows
        self.indexes = [
            IndexedSequences(raw, np.empty(file.sequences, np.int64), rows[: file.sequences])
            for raw, file in zip(self.raw, files, strict=True)
        ]
        self.scan_in_memory()

    def read_and_scan(self) -> None:
        """Run the histogram pass: read every file in pieces of 1 MiB, check both CRCs and every value, and count the
        lengths.
        """
        from gaudi_bert.tfrecords.scan import RecordScan, UnpackedFormat, allocate_scan_buffer

        buffer = allocate_scan_buffer()
        for path in self.files:
            indexed = UnpackedFormat.for_scan_in_chunks(self.unpacked_schema, buffer)
            counts = np.zeros(LENGTH + 1, np.int64)
            for _ in RecordScan(path, indexed, buffer).process_chunk_by_chunk():
                counts += np.bincount(indexed.index.lengths[: indexed.rows], minlength=LENGTH + 1)

    def scan_in_memory(self) -> None:
        """Run the histogram pass on records that are already in memory."""
        from gaudi_bert.tfrecords.scan import UnpackedFormat

        for index in self.indexes:
            UnpackedFormat(self.unpacked_schema, index).validate_and_collect_records(0, index.buffer.size)

    def encode(self) -> None:
        """Run the packing pass: encode every pack of the group as a TFRecord in a buffer."""
        pack = 0
        while pack < self.packs:
            _, pack, _ = self.encoder.encode_packs(pack, self.packs, self.out, self.record_index)

    def encode_and_write(self, path: Path) -> None:
        """Run the packing pass, and write the records to a file."""
        pack = 0
        with path.open("wb", buffering=0) as handle:
            while pack < self.packs:
                _, pack, size = self.encoder.encode_packs(pack, self.packs, self.out, self.record_index)
                handle.write(self.out[:size].data)

    def some_packs(self, count: int) -> list[list[bytes]]:
        """Return the unpacked records of the first packs."""
        starts, members = self.assignment.starts, self.assignment.members
        packs = [members[starts[pack] : starts[pack + 1]] for pack in range(count)]
        return [[self._payload(int(member)) for member in pack] for pack in packs]

    def _payload(self, member: int) -> bytes:
        """Return the payload of a record in the group."""
        number = 0
        while member >= self.indexes[number].offsets.size:
            member -= self.indexes[number].offsets.size
            number += 1
        raw, offset = self.raw[number], int(self.indexes[number].offsets[member])
        size = int(raw[offset - 12 : offset - 4].view("<u8")[0])
        return raw[offset : offset + size].tobytes()


def compare_passes(folder: Path, rounds: int) -> None:
    """Compare the CPU time per record of each pass with that of Habana's script, on one core."""
    records, planned = write_records_and_plan(folder)
    engine = Engine(records, planned)
    sequences, megabytes = FILES * SEQUENCES_PER_FILE, sum(map(os.path.getsize, engine.files)) / 1e6
    predecessor = Predecessor(records, folder, engine.some_packs(PREDECESSOR_PACKS))
    ours: dict[str, Callable[[], None]] = {
        "histogram: scan with both CRCs, bytes in memory": engine.scan_in_memory,
        "histogram: with reading the files": engine.read_and_scan,
        "pack: encode with CRCs, into memory": engine.encode,
        "pack: with writing the file": lambda: engine.encode_and_write(folder / "packed-bench"),
    }
    ratios: dict[str, list[float]] = {name: [] for name in ours}
    speeds: dict[str, list[float]] = {name: [] for name in ours}
    theirs: dict[str, list[float]] = {"histogram": [], "pack": []}
    for function in (*ours.values(), predecessor.histogram, predecessor.pack):
        function()
    for _ in range(rounds):
        theirs["histogram"].append(predecessor.histogram()[0])
        theirs["pack"].append(predecessor.pack()[0])
        for name, function in ours.items():
            cpu = measure_seconds(function)[0] / sequences
            ratios[name].append(theirs[name.split(":")[0]][-1] / cpu)
            speeds[name].append(1 / cpu)
    print(f"\nPasses, one core, CPU time, {sequences:,} records, {megabytes:.0f} MB")
    for name, costs in theirs.items():
        print_figure(f"predecessor, {name}", [1 / cost for cost in costs], "records/s")
    for name in ours:
        print_figure(name, speeds[name], "records/s")
        print_figure("", ratios[name], "times", "150")
    (folder / "packed-bench").unlink()


def compare_job(folder: Path, rounds: int) -> None:
    """Compare the stage `write` (read, scan, assign, pack, write) with both passes of Habana's script and with `cp`.

    `write` flushes every shard to the disk before it renames the shard to its final name, but `cp` does not. Therefore both
    programs are measured with and without flushing.
    """
    from gaudi_bert.tfrecords.write import write_packed_records

    records, planned = write_records_and_plan(folder)
    predecessor = Predecessor(records, folder, Engine(records, planned).some_packs(PREDECESSOR_PACKS))
    packed, copy = folder / "packed", folder / "copy"
    copying = f"cp -r '{records}' '{copy}'"

    def our(workers: int | None, flushed: bool = True) -> tuple[float, float]:
        with nullcontext() if flushed else patch("os.fsync"):
            return measure_seconds(lambda: write_packed_records(records, planned, packed, StageRun(QUIET, workers=workers)))

    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "one": lambda: our(1),
        "all": lambda: our(None),
        "all unflushed": lambda: our(None, flushed=False),
        "cp": lambda: measure_seconds(lambda: subprocess.run(copying, shell=True, check=True)),
        "cp flushed": lambda: measure_seconds(
            lambda: subprocess.run(f"{copying} && sync '{copy}'/*", shell=True, check=True)
        ),
        "predecessor": lambda: tuple(np.add(predecessor.histogram(), predecessor.pack()) * FILES * SEQUENCES_PER_FILE),
    }
    cpu: dict[str, np.ndarray] = {name: np.zeros(rounds) for name in ways}
    wall: dict[str, np.ndarray] = {name: np.zeros(rounds) for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            for path in (packed, copy):
                shutil.rmtree(path, ignore_errors=True)
            os.sync()
            seconds = way()
            if turn:  # the first round is a warm-up
                cpu[name][turn - 1], wall[name][turn - 1] = seconds
    print(f"\nWhole job, {FILES * SEQUENCES_PER_FILE:,} records, the plan being there: read, scan, assign, pack, write")
    print_figure("our CPU, 1 thread", cpu["one"], "s")
    print_figure("our CPU, all cores", cpu["all"], "s")
    print_figure("CPU, predecessor / ours (1 thread)", cpu["predecessor"] / cpu["one"], "times", "80")
    print_figure("CPU, predecessor / ours (all cores)", cpu["predecessor"] / cpu["all"], "times", "80")
    print_figure("wall, predecessor / ours (1 thread)", wall["predecessor"] / wall["one"], "times")
    print_figure("our wall, 1 thread, flushed", wall["one"], "s")
    print_figure("our wall, all cores, flushed", wall["all"], "s")
    print_figure("our wall, all cores, not flushed", wall["all unflushed"], "s")
    print_figure("wall of cp, not flushed", wall["cp"], "s")
    print_figure("wall of cp, flushed", wall["cp flushed"], "s")
    print_figure("wall, ours / cp, neither flushed", wall["all unflushed"] / wall["cp"], "times", "at most 2.5")
    print_figure("wall, ours / cp, both flushed", wall["all"] / wall["cp flushed"], "times", "at most 2.5")
    print_figure("wall, ours flushed / cp not flushed", wall["all"] / wall["cp"], "times")


if __name__ == "__main__":
    main()
