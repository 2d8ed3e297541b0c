"""One stage in a process of its own, for `benchmarks/records.py`: its peak memory, or started on request.

python records_stage.py histogram|plan|write|verify FOLDER GROUP_SEQUENCES     prints the peak resident memory in MiB
python records_stage.py write-shard RECORDS PLAN OUT K/N WORKERS               prints start and end in seconds
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from gaudi_bert.artefacts.stage_run import StageRun
from gaudi_bert.common.progress import Reporter

QUIET = Reporter(quiet=True)


def run_stage(stage: str, folder: Path, group_sequences: int) -> None:
    """Run `stage` on FOLDER/unpacked."""
    records, counts, planned, packed = (folder / name for name in ("unpacked", "histogram.json", "plan.json", "out"))
    if stage == "histogram":
        from gaudi_bert.tfrecords.histogram import histogram

        histogram(records, counts, StageRun(QUIET))
    elif stage == "plan":
        from gaudi_bert.config.sections import PackingSettings
        from gaudi_bert.packs.plan import plan

        plan([counts], planned, PackingSettings(group_sequences=group_sequences, algorithm="spfhp"), StageRun(QUIET))
    elif stage == "write":
        from gaudi_bert.tfrecords.write import write

        write(records, planned, packed, StageRun(QUIET))
    else:
        from gaudi_bert.tfrecords.verify import verify

        verify(records, packed, StageRun(QUIET))


def write_share(records: Path, planned: Path, packed: Path, shard: str, workers: int) -> None:
    """Write a share of the groups, on request; the kernels are loaded before."""
    from records_data import make_files

    from gaudi_bert.config.sections import PackingSettings
    from gaudi_bert.tfrecords.pack import pack
    from gaudi_bert.tfrecords.write import write

    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder) / "unpacked", 1, 64, seed=1)
        pack(Path(folder) / "unpacked", Path(folder) / "out", PackingSettings(algorithm="spfhp"), StageRun(QUIET))
    print("ready", flush=True)
    sys.stdin.readline()
    number, count = (int(part) for part in shard.split("/"))
    write(records, planned, packed, StageRun(QUIET, workers=workers, part=(number, count)))


def peak_mebibytes() -> float:
    """The largest resident memory since this program began. (`ru_maxrss` would count the parent's, before exec.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kibibytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kibibytes) / 1024


if __name__ == "__main__":
    if sys.argv[1] == "write-shard":
        records, planned, out = (Path(argument) for argument in sys.argv[2:5])
        write_share(records, planned, out, sys.argv[5], int(sys.argv[6]))
    else:
        run_stage(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
        print(peak_mebibytes())
