"""Kill stages at random moments, run them again, and compare the output with that of an uninterrupted run.

    python -m tools.kills SCENARIO FOLDER KILLS SEED            on a disk: one of `SCENARIOS`
    python -m tools.kills bucket FOLDER KILLS SEED STAGES       in a bucket, with an unreliable server

FOLDER is empty. This is a program of its own, because each attempt is a fork of this process, which has loaded all kernels
and has no threads. The kills therefore happen during the work and not during the start of an interpreter. If a result is
wrong, the program ends with a traceback.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gaudi_bert.artefacts.histogram import CountedFile, HistogramFile
from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.config.sections import PackingSettings, PrepareSettings, TableSettings
from gaudi_bert.corpus import blocks
from gaudi_bert.corpus.prepare import prepare_examples
from gaudi_bert.runners.local import RunRequest, run_stages
from gaudi_bert.tables.pack import pack_table
from gaudi_bert.tfrecords.convert import convert_to_hdf5
from gaudi_bert.tfrecords.plan import count_records, plan_packs
from gaudi_bert.tfrecords.verify import verify_records
from gaudi_bert.tfrecords.write import pack_records, write_packed_records
from tests.builders.folders import comparable, contents
from tests.builders.packing_case import sequences_for_hdf5, write_tfrecord
from tests.builders.reporters import QUIET, a_run
from tests.builders.s3_server import ENVIRONMENT, faulty_proxy, quick, s3_server, upload
from tests.builders.s3_server import contents as objects_below
from tests.builders.tables import random_rows, write_parquet
from tests.oracles.wire import example, frame, random_sequence

ROOT = Path(__file__).resolve().parents[1]
PACKING = PackingSettings(algorithm="spfhp", group_sequences=400, shard_multiple=4, shard_bytes=40_000)
TABLE = TableSettings(max_sequence_length=128, algorithm="lpfhp", group_sequences=150, shard_multiple=3)
PREPARE = {"train_vocab": 200, "max_sequence_length": 37, "max_predictions": 5, "duplicates": 3, "shards": 7}
PARTS = (3, 7, 16)

Action = Callable[[], object]


@dataclass(frozen=True)
class Scenario:
    """The stages to kill.

    `make_input` writes the input and returns its path. `steps` receives this path, the folder to create, the number of
    threads and the number of the round, and returns groups of actions. The groups are run one after another to create the
    folder. The actions of a group can be run in any order.
    """

    make_input: Callable[[Path], Path]
    steps: Callable[[Path, Path, int, int], list[list[Action]]]


# --- the stages to kill


def write_records(folder: Path) -> Path:
    records, rng = folder / "records", random.Random(11)
    records.mkdir()
    for number in range(8):
        payloads = [example(random_sequence(rng, 61, 9)) for _ in range(200)]
        (records / f"part-{number}").write_bytes(b"".join(frame(payload) for payload in payloads))
    return records


def write_table(folder: Path) -> Path:
    write_parquet(folder / "rows.parquet", random_rows(900, 60, seed=11), row_group_size=50)
    return folder / "rows.parquet"


def write_text(folder: Path) -> Path:
    lines = (f"Line {n} of a text says {'word ' * (n % 11 + 1)}{n * 7 % 41}." + "\n" * (n % 9 == 8) for n in range(900))
    (folder / "text.txt").write_text("\n".join(lines))
    return folder / "text.txt"


def whole_packing(records: Path, out: Path, workers: int, _: int) -> list[list[Action]]:
    packing = partial(pack_records, records, out / "packed", PACKING, a_run(workers=workers))
    return [[packing], [partial(verify_records, records, out / "packed", a_run(workers=workers))]]


def table(path: Path, out: Path, _: int, __: int) -> list[list[Action]]:
    return [[partial(pack_table, path, out / "packed", TABLE, a_run(workers=1))]]


def preparation(text: Path, out: Path, _: int, __: int) -> list[list[Action]]:
    settings = PrepareSettings(text=str(text), **PREPARE)
    return [[partial(prepare_examples, settings, out / "examples", a_run(workers=1), pipeline_folder=text.parent)]]


def parts(records: Path, out: Path, _: int, round_number: int) -> list[list[Action]]:
    """Return the parts of `histogram`, `write` and `verify`, as on several machines. The plan is a single step."""
    count = PARTS[round_number % len(PARTS)]
    scratch = out.with_name(f"{out.name}-histograms")

    scratch.mkdir(exist_ok=True)
    each = [a_run(workers=1, part=(number, count)) for number in range(count)]
    return [
        [partial(count_records, records, scratch / f"{run.part[0]}.json", run) for run in each],
        [lambda: plan_packs(list(scratch.glob("*[0-9].json")), out / "plan.json", PACKING, a_run())],
        [partial(write_packed_records, records, out / "plan.json", out / "packed", run) for run in each],
        [lambda: write_packed_records(records, out / "plan.json", out / "packed", a_run(finish=True))],
        [partial(verify_records, records, out / "packed", run) for run in each],
        [lambda: verify_records(records, out / "packed", a_run(finish=True))],
    ]


def write_histogram(folder: Path) -> Path:
    """Write a histogram of 300 files, each of which becomes a group of its own, for a plan in several parts."""
    rows = np.array([[length, length // 7 + 1, 1 + length % 3] for length in range(3, 62)])
    sequences, tokens = int(rows[:, 2].sum()), int(rows[:, 0] @ rows[:, 2])
    common = {"bytes": 10_000, "crc32c": 1, "sequences": sequences, "tokens": tokens, "counts": rows}
    files = tuple(CountedFile(name=f"part-{number:03d}", **common) for number in range(300))
    counts = tuple(300 * (1 + length % 3) if 3 <= length < 62 else 0 for length in range(1, 62))
    content = HistogramFile(max_sequence_length=61, max_predictions=9, counts=counts, files=files)
    content.write(folder / "histogram.json")
    return folder / "histogram.json"


def planning(path: Path, out: Path, workers: int, round_number: int) -> list[list[Action]]:
    """Return the parts of `plan`, as on several machines."""
    settings, count = PackingSettings(algorithm="lpfhp", group_sequences=100), PARTS[round_number % len(PARTS)]
    make = partial(plan_packs, [path], out / "plan.json", settings)
    each = [a_run(workers=workers, part=(number, count)) for number in range(count)]
    return [[partial(make, run) for run in each], [partial(make, a_run(workers=workers, finish=True))]]


def write_packs(folder: Path) -> Path:
    for number in range(3):
        write_tfrecord(folder / "records" / f"part-{number}", sequences_for_hdf5(300, 61, 9, seed=number))
    pack_records(folder / "records", folder / "packed", PACKING, a_run())
    return folder / "packed"


def conversions(packed: Path, out: Path, workers: int, _: int) -> list[list[Action]]:
    return [[partial(convert_to_hdf5, packed, out / "hdf5", reporter=QUIET, workers=workers)]]


SCENARIOS = {
    "convert": Scenario(write_packs, conversions),
    "plan": Scenario(write_histogram, planning),
    "pack": Scenario(write_records, whole_packing),
    "parts": Scenario(write_records, parts),
    "prepare": Scenario(write_text, preparation),
    "table": Scenario(write_table, table),
}


# --- killing


def start(action: Action) -> int:
    """Run `action` in a fork of this process, and return its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            if code:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)
    return child


def finish(action: Action) -> float:
    """Run `action` in a fork until it ends, and return the seconds that it took."""
    started = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(start(action), 0)[1])
    if code:
        raise SystemExit(f"an attempt that nobody killed ended with {code}")
    return time.monotonic() - started


def killed_after(action: Action, seconds: float) -> bool:
    """Run `action` and kill it after `seconds`. Return whether it was still running."""
    child = start(action)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def check_what_looks_finished(out: Path, whole: dict[str, bytes]) -> None:
    """If metadata.json exists, check that all shards and manifests are complete."""
    if (out / "packed" / "metadata.json").exists():
        made = contents(out)
        names = [name for name in whole if name.startswith(("packed/packed-", "packed/group-", "packed/metadata"))]
        assert [name for name in names if made.get(name) != whole[name]] == []


def kill_and_compare(scenario: Scenario, folder: Path, kills: int, seed: int) -> str:
    """Kill the stages of a scenario until the number of kills is reached, compare each result, and return a summary."""
    rng, source = random.Random(seed), scenario.make_input(folder)
    for group in scenario.steps(source, folder / "whole", 1, 0):  # load the kernels, without starting threads
        for action in group:
            action()
    whole = contents(folder / "whole")
    seconds = [
        sum(finish(action) for action in group) / len(group) for group in scenario.steps(source, folder / "timed", 2, 0)
    ]
    assert contents(folder / "timed") == whole, "two threads make other bytes than one"
    killed = rounds = 0
    while killed < kills:
        out = folder / f"killed-{rounds}"
        for group, duration in zip(scenario.steps(source, out, 2, rounds), seconds, strict=True):
            for action in rng.sample(group, len(group)):
                for _ in range(rng.choice([1, 1, 2, 3]) if len(group) == 1 else 1):
                    killed += killed_after(action, rng.uniform(0, duration))
                    check_what_looks_finished(out, whole)
                finish(action)
                finish(action)  # a finished output is not changed
        made = contents(out)
        assert made == whole, sorted(name for name in {*made, *whole} if made.get(name) != whole.get(name))
        assert not list(out.rglob(".*.tmp")), "temporary files are left"
        shutil.rmtree(out)
        rounds += 1
    return f"{killed} killed in {rounds} rounds"


# --- in a bucket

FAULTY_SHARE = 0.03
ENOUGH = 40


def pipeline(text: str, store: dict, prepare: dict | None = None, training: dict | None = None) -> PipelineSettings:
    sizes = {"train_vocab": 300, "max_sequence_length": 61, "max_predictions": 9, "shards": 7, "duplicates": 3}
    rhythm = {"updates": 12, "warmup_updates": 1, "save_every_updates": 3, "log_every_updates": 3, "threads": 1}
    batch = {"global_batch_sequences": 12, "micro_batch_packs": 4, "measure_speedup": False}
    mapping = {
        "name": "small",
        "prepare": {"text": text, **sizes, "evaluation_fraction": 0.1, **(prepare or {})},
        "packing": {"group_sequences": 300, "shard_multiple": 3},
        "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        "training": {**rhythm, **batch, **(training or {})},
        "store": store,
    }
    return section_from_mapping(PipelineSettings, mapping, "a test")


def write_text_files(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(5):
        documents = [
            "\n".join(f"line {m} of text {n * number} has {'word ' * ((n * m + number) % 13 + 1)}." for m in range(9))
            for n in range(37)
        ]
        (folder / f"text-{number}.txt").write_text("\n\n".join(documents))


def check_readable(url: str, endpoint: str, wanted: dict[str, bytes]) -> None:
    """Check that the shards of every group with a manifest are complete, and that everything is complete if metadata.json
    exists.
    """
    objects = ObjectStore(quick(endpoint))
    found = objects_below(url, objects)
    for name, data in found.items():
        if name.startswith("group-"):
            if not name.endswith(".json"):
                continue
            assert found[f"{name[:-5]}.index"] == wanted[f"{name[:-5]}.index"], f"no index, and {name} is there"
            for shard in json.loads(data)["shards"]:
                assert found[shard["name"]] == wanted[shard["name"]], f"{shard['name']}: not whole, and {name} is there"
    if "metadata.json" in found:
        names = [name for name in wanted if name.startswith(("packed-", "group-", "metadata"))]
        assert {name: found[name] for name in names} == {name: wanted[name] for name in names}


def kill_in_bucket(folder: Path, kills: int, seed: int, stages: list[str]) -> str:
    """Kill pipeline stages whose data are on an unreliable object store, compare the result, and return a summary."""
    import s3fs  # noqa: F401 - import once here instead of in every fork

    rng = random.Random(seed)
    os.environ.update(ENVIRONMENT)
    write_text_files(folder / "text")
    local = RunRequest(pipeline(str(folder / "text"), {}), folder / "disk", folder, a_run(workers=1))
    data = [stage for stage in stages if stage not in ("train", "evaluate", "report")]
    run_stages(local, data)  # load the kernels, without starting threads
    finish(lambda: run_stages(local, stages))
    root = folder / "disk" / "small"
    wanted = contents(root)
    packed = {name.removeprefix("packed/train/"): wanted[name] for name in wanted if name.startswith("packed/train/")}
    killed = 0
    with s3_server() as server, faulty_proxy(server.port, seed) as proxy:
        finish(lambda: server.make_bucket("bucket"))
        finish(lambda: upload(folder / "text", "s3://bucket/text", ObjectStore(quick(server.endpoint))))
        proxy.share = FAULTY_SHARE
        store = {**quick(proxy.endpoint, cache_bytes=2_000_000).model_dump(), "scratch": str(folder / "scratch")}
        settings = pipeline("s3://bucket/text", store)

        def attempt(work: str, stage: str) -> Callable[[], None]:
            run = RunRequest(settings, Path(f"s3://bucket/{work}"), folder, a_run(workers=2))
            return lambda: run_stages(run, [stage]) and None

        durations = {stage: finish(attempt("timed", stage)) for stage in stages}
        for stage in stages:
            goal = killed + (kills if stage == "write" else int(kills > 1))
            for _ in range(ENOUGH * kills):
                if killed == goal:
                    break
                killed += killed_after(attempt("killed", stage), rng.uniform(0, durations[stage]))
                if stage == "write":
                    finish(lambda: check_readable("s3://bucket/killed/small/packed/train", server.endpoint, packed))
            finish(attempt("killed", stage))

        def compare() -> None:
            made = objects_below("s3://bucket/killed/small", ObjectStore(quick(server.endpoint)))
            ours, theirs = comparable(made), comparable(wanted)
            assert ours == theirs, sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))

        finish(compare)
        faults = ", ".join(f"{count} {fault}" for fault, count in sorted(proxy.happened.items()))
    left = list((folder / "scratch").iterdir())
    assert len(left) <= 1, f"scratch of killed processes is left: {left}"
    return f"{killed} killed; faults of the server: {faults}; the same {len(comparable(wanted))} files as on a disk"


# --- the program


def run_kills(scenario: str, folder: Path, kills: int, seed: int = 11, stages: str = "") -> str:
    """Run this program in a process of its own, and return the last line that it prints. Raise an AssertionError if it
    fails.
    """
    command = [sys.executable, "-m", "tools.kills", scenario, str(folder), str(kills), str(seed), stages]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def main(name: str, folder: Path, kills: int, seed: int, stages: str = "") -> str:
    """Run one scenario, and return its summary."""
    if name == "bucket":
        return kill_in_bucket(folder, kills, seed, stages.split(","))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of tokenizers do not survive a fork
    blocks.BLOCK_CHARACTERS = 3000
    return kill_and_compare(SCENARIOS[name], folder, kills, seed)


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:]))
