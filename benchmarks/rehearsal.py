"""Run all stages on data of real size: records, histogram, plan, write and verify. Then train with two processes, kill them,
and resume.

    python benchmarks/rehearsal.py --sequences 100000 1000000 [--folder DIR] [--json figures.json]
    python benchmarks/rehearsal.py --paper figures.json

The records have random tokens and the lengths of Wikipedia at 512 tokens (`gaudi_bert/histograms/wikipedia-512.json`, which
has 16,279,552 sequences). A sequence takes about 5 kB of disk space. Each stage is a command in a process of its own that
has to read its files from the disk. The trained model is tiny, so that reading determines the speed. `--paper` extrapolates
what 10^8, 10^9 and 10^10 sequences need from the two largest runs (docs/figures.md#scale).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measuring import describe_processor  # noqa: E402
from records_data import MASKED_SHARE, MAX_PREDICTIONS, VOCABULARY, draw_lengths  # noqa: E402
from watched import Watched, watch  # noqa: E402

from gaudi_bert.tfrecords.wire.example import UnpackedRows, encode_unpacked_rows  # noqa: E402

LENGTH, FILE_SEQUENCES, SEED = 512, 50_000, 22
ROWS_AT_ONCE = 1000
OPEN_FILES = 1024
GAUDI_BERT = [sys.executable, "-m", "gaudi_bert"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
QUIET_ENVIRONMENT = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
PIPELINE = """
name: rehearsal
model: {{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 32}}
training:
  {{global_batch_sequences: 64, micro_batch_packs: 16, updates: {updates}, warmup_updates: 1, log_every_updates: 1,
   save_every_updates: 10, evaluate_every_updates: 1000000, measure_speedup: false, threads: 1}}
"""
UPDATES, KILLED_AFTER = 30, 10


# --- records


def make_rows(lengths: np.ndarray, rng: np.random.Generator) -> UnpackedRows:
    """Return random sequences of these lengths, with 15 % of their tokens masked at evenly spread positions."""
    masked = np.clip(np.rint(lengths * MASKED_SHARE).astype(np.int64), 1, np.minimum(MAX_PREDICTIONS, lengths - 1))
    step = ((lengths - 1) / masked)[:, None]
    spread = np.arange(MAX_PREDICTIONS) * step + rng.random((len(lengths), MAX_PREDICTIONS)) * (step - 1)
    return UnpackedRows(
        lengths,
        masked,
        rng.integers(1000, VOCABULARY, (len(lengths), LENGTH)),
        np.zeros((len(lengths), LENGTH), np.int64),
        1 + np.floor(spread).astype(np.int64),
        rng.integers(1000, VOCABULARY, spread.shape),
        rng.integers(0, 2, len(lengths)),
    )


def make_file(folder: Path, sequences: int, number: int) -> None:
    """Write one file of the records, unless it already exists."""
    path = folder / f"part-{number:05d}.tfrecord"
    count = min(FILE_SEQUENCES, sequences - number * FILE_SEQUENCES)
    if path.exists():
        return
    lengths = np.maximum(draw_lengths(count, SEED * 1_000_003 + number), 2).astype(np.int64)
    rng = np.random.default_rng([SEED, number])
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as handle:
        for first in range(0, count, ROWS_AT_ONCE):
            handle.write(encode_unpacked_rows(make_rows(lengths[first : first + ROWS_AT_ONCE], rng))[0].data)
    temporary.rename(path)


def make_records(folder: Path, sequences: int) -> None:
    """Write the unpacked records, with all cores."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(make_file, folder, sequences), range(-(-sequences // FILE_SEQUENCES))))


# --- stages


def drop_from_page_cache(folder: Path) -> None:
    """Drop the files of a folder from the kernel's page cache, so that they have to be read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def require_exit_code(seen: Watched, codes: tuple[int, ...] = (0,)) -> Watched:
    """Return the resources of a command. If the command ended with an unexpected exit code, end the benchmark."""
    if seen.code not in codes:
        raise SystemExit(f"ended with {seen.code}:\n{seen.output[-3000:]}")
    return seen


def watch_stages(folder: Path, records: Path) -> Iterator[tuple[str, Watched]]:
    """Run each data stage, and yield its name and the resources that it used."""
    histogram, plan, packed = folder / "histogram.json", folder / "plan.json", folder / "packed"
    commands: dict[str, list[str | Path]] = {
        "histogram": ["histogram", records, "--out", histogram],
        "plan": ["plan", histogram, "--out", plan],
        "write": ["write", records, "--plan", plan, "--out", packed],
        "verify": ["verify", records, packed],
    }
    for name, command in commands.items():
        drop_from_page_cache(folder)
        yield name, require_exit_code(watch([*GAUDI_BERT, *command], environment=QUIET_ENVIRONMENT))


def watch_training(folder: Path) -> Iterator[tuple[str, Watched]]:
    """Train with two processes, kill them after the first checkpoint, and resume with two other processes. Yield the
    resources of both runs.
    """
    pipeline, out = folder / "rehearsal.yaml", folder / "train"
    pipeline.write_text(PIPELINE.format(updates=UPDATES), encoding="utf-8")
    command = [*MPIRUN, *GAUDI_BERT, "train", "--pipeline", pipeline, "--data", folder / "packed", "--out", out]

    def has_saved() -> bool:
        return len(read_logged_updates(out)) > KILLED_AFTER + 2

    for name, kill_when in (("train, killed", has_saved), ("train, resumed", None)):
        drop_from_page_cache(folder / "packed")
        seen = watch(command, environment=QUIET_ENVIRONMENT, open_files=OPEN_FILES, kill_when=kill_when)
        yield name, require_exit_code(seen, (-9,) if kill_when else (0,))
    updates = [entry["update"] for entry in read_logged_updates(out)]
    if updates[-1] != UPDATES or f"update {KILLED_AFTER + 1}/" not in seen.output or "update 1/" in seen.output:
        raise SystemExit(f"the resumed run ended at update {updates[-1]}:\n{seen.output[-3000:]}")


def read_logged_updates(out: Path) -> list[dict]:
    """Return the complete lines of metrics.jsonl that describe updates."""
    path = out / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [entry for entry in map(json.loads, lines) if "update" in entry]


def rehearse(folder: Path, sequences: int) -> dict[str, dict[str, float]]:
    """Run all stages for one number of sequences, print each result as soon as it is available, and return all results."""
    records = folder / "records"
    make_records(records, sequences)
    unpacked = sum(path.stat().st_size for path in records.iterdir())
    print(f"\n{sequences:,} sequences, {unpacked / 1e9:.2f} GB of records", flush=True)
    print(
        f"{'':<16}{'wall s':>9}{'CPU s':>9}{'sequences/CPU s':>17}{'peak MiB':>10}{'own MiB':>9}{'files':>7}{'read MiB':>10}"
    )
    figures: dict[str, dict[str, float]] = {"records": {"bytes": unpacked}}
    for name, seen in (*watch_stages(folder, records), *watch_training(folder)):
        figures[name] = {key: getattr(seen, key) for key in ("wall", "cpu", "peak", "own_peak", "files", "read")}
        rate = f"{sequences / seen.cpu:,.0f}" if not name.startswith("train") else ""
        print(
            f"{name:<16}{seen.wall:>9.1f}{seen.cpu:>9.1f}{rate:>17}{seen.peak:>10.0f}{seen.own_peak:>9.0f}{seen.files:>7}"
            f"{seen.read:>10.0f}",
            flush=True,
        )
    packed = sum(path.stat().st_size for path in (folder / "packed").glob("packed-*"))
    figures["packed"] = {"bytes": packed}
    print(f"packed: {packed / 1e9:.2f} GB in {len(list((folder / 'packed').glob('packed-*')))} shards", flush=True)
    return figures


# --- extrapolation to larger data


def print_extrapolation(content: dict) -> None:
    """Print a Markdown table of the CPU hours and the disk space of each stage, extrapolated from the difference between the
    two largest runs.
    """
    sizes = sorted(map(int, content["runs"]))
    small, large = (content["runs"][str(size)] for size in (sizes[-2], sizes[-1]))
    added = sizes[-1] - sizes[-2]
    print(f"Measured on {content['processor']}; rates between {sizes[-2]:,} and {sizes[-1]:,} sequences.\n")
    print(
        "| sequences | groups | shards | records | packs on disk | "
        + " | ".join(("histogram", "plan", "write", "verify"))
        + " |"
    )
    print("|---|---|---|---|---|" + "---|" * 4)
    for power in (8, 9, 10):
        count = 10**power
        disk = [large[key]["bytes"] / sizes[-1] * count / 1e12 for key in ("records", "packed")]
        hours = [
            (large[stage]["cpu"] - small[stage]["cpu"]) / added * count / 3600
            for stage in ("histogram", "plan", "write", "verify")
        ]
        groups = count / 500_000
        cells = [f"10^{power}", f"{groups:,.0f}", f"{32 * groups:,.0f}", *(f"{size:.2f} TB" for size in disk)]
        print(f"| {' | '.join([*cells, *(f'{hour:.2g} h' for hour in hours)])} |")
    print("\nHours are of one core; all but `plan` may be dealt to any number of machines (`--shard K/N`).")


def print_growth(runs: dict[str, dict]) -> None:
    """Print how CPU time and peak memory grow from each run to the next larger one."""
    sizes = sorted(map(int, runs))
    for one, other in itertools.pairwise(sizes):
        print(f"\nfrom {one:,} to {other:,} sequences, {other / one:.3g} times as many:")
        for stage in ("histogram", "plan", "write", "verify"):
            before, after = runs[str(one)][stage], runs[str(other)][stage]
            print(
                f"  {stage:<10} CPU time {after['cpu'] / before['cpu']:6.2f} times,"
                f" own memory {after['own_peak'] / before['own_peak']:5.2f} times"
            )


def main() -> None:
    """Run the benchmark for each number of sequences, or print an extrapolation from saved figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--folder", type=Path, help="folder for temporary files, which are removed afterwards")
    parser.add_argument("--json", type=Path, help="save the figures in this file")
    parser.add_argument("--paper", type=Path, help="extrapolate to larger data from saved figures")
    options = parser.parse_args()
    if options.paper:
        print_extrapolation(json.loads(options.paper.read_text(encoding="utf-8")))
        return
    content = {"processor": describe_processor(), "runs": {}}
    print(f"measured on {content['processor']}")
    for sequences in options.sequences:
        folder = Path(tempfile.mkdtemp(prefix="rehearsal-", dir=options.folder))
        try:
            content["runs"][str(sequences)] = rehearse(folder, sequences)
        finally:
            shutil.rmtree(folder)
        if options.json:
            options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    print_growth(content["runs"])


if __name__ == "__main__":
    main()
