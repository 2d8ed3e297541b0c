"""Kills stages that work in a bucket at random moments, behind a bad server, and runs them again; run as a program.

    python -m tests.builders.kill_in_store FOLDER KILLS STAGES SEED

Each attempt is a fork of this process, so that the kernels are loaded and its life is the stage alone. After each kill of
`write`, whatever a reader would take for whole must be: the shards of every group with a manifest, and everything where
there is metadata.json. When the stages are done, the bucket holds the bytes of a run on a disk.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import s3fs  # noqa: F401 - loaded here once, not by every fork

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings, pipeline_from_mapping
from gaudi_bert.runners.local import LocalRun, run_stages
from tests.builders.faulty_proxy import faulty_proxy
from tests.builders.s3_server import ENVIRONMENT, contents, quick, s3_server, upload

QUIET = Reporter(quiet=True)
FAULTY_SHARE = 0.03
ENOUGH = 40
# What says how fast a run was, or where it ran.
OF_THE_RUN = ("tensorboard/", ".log", "metrics.jsonl", "training.json", "settings.yaml", "report.html")


def pipeline(text: str, store: dict) -> PipelineSettings:
    return pipeline_from_mapping(
        {
            "name": "small",
            "prepare": {
                "text": text,
                "train_vocab": 300,
                "max_sequence_length": 61,
                "max_predictions": 9,
                "shards": 7,
                "duplicates": 3,
                "evaluation_fraction": 0.1,
            },
            "packing": {"group_sequences": 300, "shard_multiple": 3},
            "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
            "training": {
                "updates": 12,
                "warmup_updates": 1,
                "global_batch_sequences": 12,
                "micro_batch_packs": 4,
                "threads": 1,
                "save_every_updates": 3,
                "log_every_updates": 3,
                "measure_speedup": False,
            },
            "store": store,
        },
        "kill_in_store",
    )


def write_text_files(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(5):
        documents = [
            "\n".join(f"line {m} of text {n * number} has {'word ' * ((n * m + number) % 13 + 1)}." for m in range(9))
            for n in range(37)
        ]
        (folder / f"text-{number}.txt").write_text("\n\n".join(documents))


def start(action: Callable[[], None]) -> int:
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


def in_child(action: Callable[[], None]) -> float:
    """Run `action` to its end in a process of its own; how long that took."""
    started = time.monotonic()
    _, status = os.waitpid(start(action), 0)
    if status:
        raise SystemExit(f"an attempt that nobody killed ended with {status}")
    return time.monotonic() - started


def check_readable(url: str, endpoint: str, wanted: dict[str, bytes]) -> None:
    """What a reader would take for whole is as it should be."""
    objects = Objects(quick(endpoint))
    found = contents(url, objects)
    for name, content in found.items():
        if name.startswith("group-"):
            for shard in json.loads(content)["shards"]:
                assert found[shard["name"]] == wanted[shard["name"]], f"{shard['name']}: not whole, and {name} is there"
    if "metadata.json" in found:
        assert {name: found[name] for name in wanted if name.startswith(("packed-", "group-", "metadata"))} == {
            name: wanted[name] for name in wanted if name.startswith(("packed-", "group-", "metadata"))
        }


def comparable(found: dict[str, bytes]) -> dict[str, bytes]:
    kept = {name: content for name, content in found.items() if not any(part in name for part in OF_THE_RUN)}
    return {name: content for name, content in kept.items() if not any(part.startswith(".") for part in name.split("/"))}


def main(folder: Path, kills: int, stages: list[str], seed: int) -> None:
    rng = random.Random(seed)
    os.environ.update(ENVIRONMENT)
    write_text_files(folder / "text")
    local = LocalRun(pipeline(str(folder / "text"), {}), folder / "disk", folder, QUIET, workers=1)
    data = [stage for stage in stages if stage not in ("train", "evaluate", "report")]
    run_stages(local, data)  # loads the kernels, and starts no thread
    in_child(lambda: run_stages(local, stages))
    root = folder / "disk" / "small"
    wanted = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    packed = {name.removeprefix("packed/train/"): wanted[name] for name in wanted if name.startswith("packed/train/")}
    killed = 0
    with s3_server() as server, faulty_proxy(server.port, seed) as proxy:
        in_child(lambda: server.make_bucket("bucket"))
        in_child(lambda: upload(folder / "text", "s3://bucket/text", Objects(quick(server.endpoint))))
        proxy.share = FAULTY_SHARE
        store = {**quick(proxy.endpoint, cache_bytes=2_000_000).model_dump(), "scratch": str(folder / "scratch")}
        settings = pipeline("s3://bucket/text", store)

        def attempt(work: str, stage: str) -> Callable[[], None]:
            run = LocalRun(settings, Path(f"s3://bucket/{work}"), folder, QUIET, workers=2)
            return lambda: run_stages(run, [stage]) and None

        durations = {stage: in_child(attempt("timed", stage)) for stage in stages}
        print(
            "seconds of each stage:", ", ".join(f"{stage} {took:.1f}" for stage, took in durations.items()), file=sys.stderr
        )
        for stage in stages:
            goal = killed + (kills if stage == "write" else 1)
            for _ in range(ENOUGH * kills):
                if killed == goal:
                    break
                child = start(attempt("killed", stage))
                time.sleep(rng.uniform(0, durations[stage]))
                os.kill(child, signal.SIGKILL)
                killed += os.waitpid(child, 0)[1] == signal.SIGKILL
                if stage == "write":
                    in_child(lambda: check_readable("s3://bucket/killed/small/packed/train", server.endpoint, packed))
            in_child(attempt("killed", stage))

        def compare() -> None:
            made = contents("s3://bucket/killed/small", Objects(quick(server.endpoint)))
            assert comparable(made) == comparable(wanted), sorted(
                name for name in {*comparable(made), *comparable(wanted)} if made.get(name) != wanted.get(name)
            )

        in_child(compare)
        faults = ", ".join(f"{count} {fault}" for fault, count in sorted(proxy.happened.items()))
    left = list((folder / "scratch").iterdir())
    assert len(left) <= 1, f"scratch of killed processes is left: {left}"
    print(f"{killed} killed; faults of the server: {faults}; the same {len(comparable(wanted))} files as on a disk")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]))
