"""What an object store costs: `histogram` and `write` from and to a bucket beside the local disk, and beside s3fs alone.

    python benchmarks/stores.py [--files 6] [--sequences 6000] [--rounds 5]
    python benchmarks/stores.py --kills 50        kills `write` so often at random, every other stage once; compares bytes

The server (moto, on loopback) is a process of its own: CPU time is ours. s3fs alone gets and puts the same objects through
the same server, one after the other, with the same library. Rounds alternate; ratios are of one round each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measuring import show, show_processor, timed  # noqa: E402
from records_data import make_files  # noqa: E402

from gaudi_bert.artefacts.stage_run import StageRun  # noqa: E402
from gaudi_bert.artefacts.store.objects import Objects  # noqa: E402
from gaudi_bert.common.progress import Reporter  # noqa: E402
from gaudi_bert.config.places import StoreSettings  # noqa: E402
from gaudi_bert.config.sections import PackingSettings  # noqa: E402
from gaudi_bert.packs.plan import plan  # noqa: E402
from gaudi_bert.tfrecords.histogram import histogram  # noqa: E402
from gaudi_bert.tfrecords.write import write  # noqa: E402
from tests.builders.s3_server import ENVIRONMENT, s3_server, upload  # noqa: E402

QUIET = Reporter(quiet=True)
# The records of a file are written so often: making them takes longer than all that is measured.
REPEATED = 3
STAGES = ("prepare", "histogram", "plan", "write", "verify", "train", "evaluate", "report")
MEMORY = """
import sys
from pathlib import Path
from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.places import StoreSettings
from gaudi_bert.tfrecords.write import write
import s3fs
records, plan, out, endpoint = sys.argv[1:]
write(records, Path(plan), Path(out), StageRun(Reporter(quiet=True), store=StoreSettings(endpoint_url=endpoint)))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")))
"""


def measure(files: int, sequences: int, rounds: int) -> None:
    """Print the figures."""
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as name, s3_server() as server:
        folder, store = Path(name), StoreSettings(endpoint_url=server.endpoint, scratch=name)
        server.make_bucket("bucket")
        for path in make_files(folder / "unpacked", files, sequences, seed=1):
            path.write_bytes(path.read_bytes() * REPEATED)
        objects = Objects(store)
        upload(folder / "unpacked", "s3://bucket/unpacked", objects)
        histogram(folder / "unpacked", folder / "histogram.json", StageRun(QUIET))
        grouping = PackingSettings(group_sequences=max(1, files // 3) * sequences * REPEATED, algorithm="spfhp")
        plan([folder / "histogram.json"], folder / "plan.json", grouping, StageRun(QUIET))
        megabytes = sum(path.stat().st_size for path in (folder / "unpacked").iterdir()) / 1e6
        print(f"{files} files, {megabytes:.0f} MB, {sequences * files * REPEATED:,} sequences, three groups or so")
        measure_stage("histogram", folder, store, rounds)
        measure_stage("write", folder, store, rounds)
        measure_memory(folder, server.endpoint)


def run_stage(stage: str, records: str | Path, out: Path, folder: Path, store: StoreSettings) -> None:
    """Run a stage to its end, from the beginning."""
    if stage == "histogram":
        histogram(records, out / "histogram.json", StageRun(QUIET, store=store))
    else:
        write(records, folder / "plan.json", out / "packed", StageRun(QUIET, store=store))


def copy_with_s3fs(stage: str, folder: Path, store: StoreSettings, number: int) -> None:
    """What s3fs takes to get the same inputs, and to put the same outputs."""
    import s3fs

    filesystem = s3fs.S3FileSystem(endpoint_url=store.endpoint_url)
    target = folder / "copied"
    target.mkdir()
    for path in sorted((folder / "unpacked").iterdir()):
        filesystem.get_file(f"bucket/unpacked/{path.name}", str(target / path.name))
    if stage == "write":
        for path in sorted((folder / "local" / "packed").iterdir()):
            if not path.name.startswith("."):
                filesystem.put_file(str(path), f"bucket/copied-{number}/{path.name}")
    shutil.rmtree(target)


def measure_stage(stage: str, folder: Path, store: StoreSettings, rounds: int) -> None:
    """Alternate the disk, the bucket and s3fs alone."""
    whole, ours, wall = [], [], []
    for number in range(rounds + 1):
        shutil.rmtree(folder / "local", ignore_errors=True)
        local = timed(lambda: run_stage(stage, folder / "unpacked", folder / "local", folder, store))
        out = Path(f"s3://bucket/{stage}-{number}")
        stored = timed(lambda out=out: run_stage(stage, "s3://bucket/unpacked", out, folder, store))
        alone = timed(lambda number=number: copy_with_s3fs(stage, folder, store, number))
        if number:  # the first round loads libraries and kernels
            whole.append(local[0] / stored[0])
            ours.append(local[0] / max(stored[0] - alone[0], 1e-9))
            wall.append(stored[1] / alone[1])
    print(f"{stage}:")
    show("rate of the disk, by the CPU time of all", whole, "x")
    show("... by our CPU time, without what s3fs takes alone", ours, "x", "0.8")
    show("wall time, of what s3fs takes to copy the same", wall, "x")


def measure_memory(folder: Path, endpoint: str) -> None:
    """Peak memory of `write`, on a disk and in the bucket, in processes of their own."""
    peaks = []
    for records, out in ((folder / "unpacked", folder / "memory"), ("s3://bucket/unpacked", "s3://bucket/memory")):
        command = [sys.executable, "-c", MEMORY, str(records), str(folder / "plan.json"), str(out), endpoint]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 1024)
    print(f"  peak memory of write: {peaks[0]:.0f} MiB on the disk, {peaks[1]:.0f} MiB in the bucket")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    show_processor()
    if arguments.kills:
        with tempfile.TemporaryDirectory() as name:
            command = [sys.executable, "-m", "tests.builders.kills", "bucket", f"{name}/kills"]
            subprocess.run([*command, str(arguments.kills), "11", ",".join(STAGES)], cwd=ROOT, check=True)
        return
    measure(arguments.files, arguments.sequences, arguments.rounds)


if __name__ == "__main__":
    main()
