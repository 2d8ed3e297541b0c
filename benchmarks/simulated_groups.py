"""Planning, a writer's start and `write --finish` at a scale that no disk here holds: histograms are made, records are not.

    python -m benchmarks.simulated_groups FOLDER [--groups 20000] [--histograms 8] [--shards 8] [--measured 8]

Each group is one file of about 490,000 sequences: Wikipedia's counts (gaudi_bert/histograms) with an error by a seed, one of
64. So there are 64 different groups. They are packed by nnls once, for the time a group takes; the stage itself then makes
the parts of the first shards with these packings, and those of the other shards are put together from their text.
Records and shards are empty files of their sizes (holes, which take no room); manifests are made from the plan. Each line
is a process of its own: its CPU and wall time, its peak memory (ru_maxrss), and the same of a plan of one group, which is
what Python, numpy and the kernels take.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, PREDICTIONS, SHARDS_OF_A_GROUP, VARIANTS = 512, 76, 32, 64
FILE_BYTES = 1_000_000_000


def make_histograms(folder: Path, *sizes: str) -> dict[str, Any]:
    """Histograms as K of N machines write them, and the files that they count."""
    from gaudi_bert.artefacts.histogram import CountedFile, HistogramFile
    from gaudi_bert.reporting.estimate import shipped_histograms

    groups, histograms = map(int, sizes)
    base = np.array(json.loads(shipped_histograms()["wikipedia-512"].read_text())["counts"], np.float64)
    lengths = np.arange(1, LENGTH + 1)
    masked = np.clip(np.round(0.15 * lengths), 1, PREDICTIONS).astype(np.int64)
    (folder / "records").mkdir(parents=True, exist_ok=True)
    for part in range(histograms):
        files, total = [], np.zeros(LENGTH, np.int64)
        for number in range(part, groups, histograms):
            counts = np.random.default_rng(number % VARIANTS).poisson(base * 490_000 / base.sum())
            total += counts
            file = {
                "name": f"part-{number:06d}.tfrecord",
                "bytes": FILE_BYTES,
                "crc32c": number,
                "sequences": int(counts.sum()),
                "tokens": int(counts @ lengths),
            }
            files.append(CountedFile(**file, counts=np.stack([lengths, masked, counts], axis=1)[counts > 0]))
            make_hole(folder / "records" / file["name"], FILE_BYTES)
        HistogramFile(
            max_sequence_length=LENGTH,
            max_predictions=PREDICTIONS,
            counts=tuple(total.tolist()),
            files=tuple(files),
        ).write(folder / f"histogram-{part:05d}-of-{histograms:05d}.json")
    return {}


def make_hole(path: Path, size: int) -> None:
    """An empty file of this size."""
    with open(path, "wb") as handle:
        handle.truncate(size)


def make_groups(folder: Path) -> dict[str, Any]:
    """Manifests, and what they name, for all groups of a plan."""
    from gaudi_bert.artefacts.base import InputFile, manifest_path
    from gaudi_bert.artefacts.packed import GroupManifest, of_counts
    from gaudi_bert.artefacts.plan import WritablePlan
    from gaudi_bert.artefacts.shards import Shard, index_bytes, index_path, shard_bounds

    plan, out = WritablePlan.read(folder / "plan.json"), folder / "packed"
    out.mkdir(exist_ok=True)
    for number, packs in enumerate(plan.group_packs):
        counts = np.zeros(LENGTH + 1, np.int64)
        for strategy, count in plan.group(number).strategies:
            np.add.at(counts, list(strategy), count)
        sizes = np.diff(shard_bounds(packs, SHARDS_OF_A_GROUP, 0)).tolist()
        shards = [
            Shard(name=f"packed-{number:05d}-{shard:05d}.tfrecord", packs=size, bytes=size * 7000, crc32c=shard)
            for shard, size in enumerate(sizes)
        ]
        for shard in shards:
            make_hole(out / shard.name, shard.bytes)
        make_hole(index_path(out, number), index_bytes(packs))
        manifest = GroupManifest(
            format_version=2,
            plan_sha256=plan.sha256,
            group=number,
            packs=packs,
            **of_counts(counts[1:].tolist()),
            inputs=tuple(InputFile(name=f.name, bytes=f.bytes, crc32c=f.crc32c) for f in plan.group_files(number)),
            index_crc32c=number,
            shards=tuple(shards),
        )
        manifest_path(out, number).write_text(json.dumps(manifest.as_json(), indent=1))
    return {}


# --- what is measured, each in a process of its own


def a_run(**how: Any) -> Any:
    """How a stage runs that says nothing."""
    from gaudi_bert.artefacts.stage_run import StageRun
    from gaudi_bert.common.progress import Reporter

    return StageRun(Reporter(quiet=True), **how)


def histograms_of(folder: Path) -> list[Path]:
    """All of a folder."""
    return sorted(folder.glob("histogram-*-of-*.json"))


def planned_by(folder: Path, **how: Any) -> Any:
    """What the stage returns."""
    from gaudi_bert.config.sections import PackingSettings
    from gaudi_bert.tfrecords import plan

    remember_packings(folder)
    settings = PackingSettings(algorithm="nnls")
    return plan.plan(histograms_of(folder), folder / "plan.json", settings, a_run(workers=1, **how))


def remember_packings(folder: Path) -> None:
    """Let the stage pack each of the 64 different groups once, and keep what came of it for the next process."""
    from gaudi_bert.packing import algorithms
    from gaudi_bert.tfrecords import plan

    path, pack = folder.parent / "packings.pickle", algorithms.pack_histogram
    kept: dict[Any, Any] = pickle.loads(path.read_bytes()) if path.exists() else {}

    def packed(histogram: Any, *arguments: Any, **options: Any) -> Any:
        key = histogram.counts.tobytes()
        if key not in kept:
            kept[key] = pack(histogram, *arguments, **options)
            path.write_bytes(pickle.dumps(kept))
        return kept[key]

    vars(plan)["pack_histogram"] = packed


def read_counts(folder: Path) -> dict[str, Any]:
    """Both passes but for the counts of groups: all is read once, and once more for the digest."""
    from gaudi_bert.tfrecords.histogram import read_histograms

    records = read_histograms(histograms_of(folder))
    return {"files": len(records.files or ()), "sha256": records.sha256[:8]}


def shard(folder: Path, number: str, shards: str) -> dict[str, Any]:
    """One of many machines that plan."""
    result = planned_by(folder, part=(int(number), int(shards)))
    return {"groups": result.groups, "packs": result.packs}


def finish(folder: Path) -> dict[str, Any]:
    """The totals of all parts."""
    totals = planned_by(folder, finish=True).content
    return {"groups": totals.groups, "packs": totals.packs, "strategies": totals.strategies_used}


def whole(folder: Path) -> dict[str, Any]:
    """One process."""
    return {"groups": planned_by(folder).content.groups}


def other_parts(folder: Path) -> dict[str, Any]:
    """Put the parts that are missing together from the groups of those that are there."""
    from gaudi_bert.artefacts.plan import GROUPS_OF_A_PART, part_path
    from gaudi_bert.config.sections import PackingSettings
    from gaudi_bert.packing.histogram import form_groups
    from gaudi_bert.tfrecords.histogram import read_histograms

    chosen, plan = PackingSettings(), folder / "plan.json"
    there = [json.loads(path.read_text()) for path in sorted(folder.glob("plan-0*.json"))[:20]]
    groups = {number_of(group["files"][0]) % VARIANTS: group for part in there for group in part["groups"]}
    made = 0
    records = read_histograms(histograms_of(folder))
    formed = form_groups(records.files, chosen.group_sequences, chosen.group_bytes, chosen.seed)
    for part, first in enumerate(range(0, len(formed), GROUPS_OF_A_PART)):
        if part_path(plan, part).exists():
            continue
        files = [file for group in formed[first : first + GROUPS_OF_A_PART] for file in group]
        variants = [number_of(file.name) % VARIANTS for file in files]
        named = ("name", "bytes", "crc32c", "sequences")
        content = {
            **there[0],
            "part": part,
            "files": [{key: getattr(file, key) for key in named} for file in files],
            "groups": [{**groups[v], "files": [file.name]} for v, file in zip(variants, files, strict=True)],
        }
        lines = []
        for key, value in content.items():
            entries = ",\n  ".join(map(json.dumps, value)) if key in ("files", "groups") else None
            lines.append(f' "{key}": ' + (json.dumps(value) if entries is None else f"[\n  {entries}\n ]"))
        part_path(plan, part).write_text("{\n" + ",\n".join(lines) + "\n}\n")
        made += 1
    return {"made": made}


def number_of(name: str) -> int:
    """Of a file."""
    return int(name[5:11])


def solve(folder: Path) -> dict[str, Any]:
    """The time that packing one group takes, whatever is kept."""
    from gaudi_bert.packing.algorithms import pack_histogram
    from gaudi_bert.packing.histogram import group_histogram
    from gaudi_bert.tfrecords.histogram import read_histograms

    files = read_histograms(histograms_of(folder)).files[:4]
    started = time.process_time()
    for number, file in enumerate(files):
        if number == 1:
            started = time.process_time()  # the first one loads the kernels
        pack_histogram(group_histogram([file.counts], LENGTH), "nnls", 3, max_predictions=PREDICTIONS, seed=12345)
    return {"cpu_seconds_a_group": round((time.process_time() - started) / 3, 2)}


def writer(folder: Path) -> dict[str, Any]:
    """`write --shard 0/8` up to the first record: the files hold none, which ends it there."""
    from gaudi_bert.common.errors import InputError
    from gaudi_bert.tfrecords.write import write

    started = time.process_time()
    try:
        write(folder / "records", folder / "plan.json", folder / "started", a_run(workers=1, part=(0, 8)))
    except InputError as error:
        return {"cpu_seconds_after_imports": round(time.process_time() - started, 2), "ended": str(error)[-60:]}
    raise SystemExit("it should not have found a record")


def write_finish(folder: Path) -> dict[str, Any]:
    """The metadata of manifests that are all there."""
    from gaudi_bert.artefacts.completion import Signature, settings_path
    from gaudi_bert.artefacts.packed import Metadata
    from gaudi_bert.artefacts.plan import Plan
    from gaudi_bert.common.files import write_json
    from gaudi_bert.tfrecords.write import write

    out, plan = folder / "packed", folder / "plan.json"
    planned = Plan.read(plan)
    settings = {key: getattr(planned, key) for key in Metadata.planned}
    signature = Signature("write", settings, {"plan_sha256": planned.sha256})
    write_json(settings_path(out), signature.as_json())
    content = write(folder / "records", plan, out, a_run(finish=True)).content
    return {"shards": len(content.shard_table), "megabytes": round((out / "metadata.json").stat().st_size / 1e6, 1)}


def metadata(folder: Path) -> dict[str, Any]:
    """What a trainer reads first."""
    from gaudi_bert.artefacts.packed import Metadata

    started = time.process_time()
    table = Metadata.read(folder / "packed").shard_table
    return {"shards": len(table), "cpu_seconds_after_imports": round(time.process_time() - started, 2)}


CHILDREN = (
    make_histograms,
    make_groups,
    read_counts,
    shard,
    other_parts,
    finish,
    whole,
    solve,
    writer,
    write_finish,
    metadata,
)
MEASURED: dict[str, Any] = {function.__name__: function for function in CHILDREN}


def child(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """One of these in a process of its own; this one stays small, for a child's peak is at least that of its parent."""
    started = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "benchmarks.simulated_groups", str(folder), "--child", name, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{name}: {result.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(result.stdout), "cpu_s": round(cpu, 1), "wall_s": round(time.monotonic() - started, 1)}


def report(name: str, of_many: dict[str, Any], of_one: dict[str, Any] | None = None) -> None:
    """Print a line."""
    of_one = of_one or {}
    others = {key: value for key, value in of_many.items() if key not in ("cpu_s", "wall_s", "peak_mib")}
    beside = f" (one group: {of_one['cpu_s']} s, {of_one['peak_mib']} MiB)" if of_one else ""
    of_process = f"{of_many['cpu_s']:8.1f} s CPU {of_many['wall_s']:8.1f} s wall {of_many['peak_mib']:6} MiB"
    print(f"{name:24} {of_process}{beside}  {others}", flush=True)


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--histograms", type=int, default=8)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--measured", type=int, default=8, help="shards whose parts the stage makes")
    parser.add_argument("--from", dest="begin", choices=("start", "parts"), default="start", help="what is there already")
    parser.add_argument("--child", nargs="+")
    options = parser.parse_args()
    if options.child:
        name, *arguments = options.child
        result = MEASURED[name](options.folder, *arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({**result, "peak_mib": peak}))
        return
    many, one = options.folder / "many", options.folder / "one"
    if options.begin == "start":
        prepare(options, many, one)
    if options.measured < options.shards:
        child(many, "other_parts")
    report("plan --finish", child(many, "finish"))
    if options.measured == options.shards:
        compare_with_one_process(many)
    report("a writer's start", child(many, "writer"), child(one, "writer"))
    for folder in (many, one):
        child(folder, "make_groups")
    report("write --finish", child(many, "write_finish"), child(one, "write_finish"))
    report("reading metadata.json", child(many, "metadata"), child(one, "metadata"))


def prepare(options: argparse.Namespace, many: Path, one: Path) -> None:
    """Make the histograms, and the parts of the shards that are measured."""
    shutil.rmtree(options.folder, ignore_errors=True)
    for folder, groups, histograms in ((many, options.groups, options.histograms), (one, 1, 1)):
        folder.mkdir(parents=True)
        child(folder, "make_histograms", str(groups), str(histograms))
    sizes = [os.stat(path).st_size / 1e6 for path in histograms_of(many)]
    print(f"{options.groups} groups, histograms of {sizes[0]:.0f} MB each, {len(sizes)} of them")
    report("packing one group", child(one, "solve"))
    report("reading the histograms", child(many, "read_counts"), child(one, "read_counts"))
    child(one, "whole")
    for number in range(options.measured):
        report(f"plan --shard {number}/{options.shards}", child(many, "shard", str(number), str(options.shards)))


def compare_with_one_process(many: Path) -> None:
    """One process makes all parts and totals anew: the same bytes."""
    made = {path.name: path.read_bytes() for path in many.glob("plan*.json")}
    for name in made:
        (many / name).unlink()
    report("one process makes all", child(many, "whole"))
    again = {path.name: path.read_bytes() for path in many.glob("plan*.json")}
    print(f"the same bytes: {made == again}, {len(made)} files of {sum(map(len, made.values())) / 1e6:.0f} MB together")


if __name__ == "__main__":
    main()
