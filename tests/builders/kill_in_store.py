"""Kills stages that work in a bucket at random moments, behind a bad server, and runs them again; run as a program.

    python -m tests.builders.kill_in_store FOLDER KILLS STAGES SEED

Each attempt is a fork of this process, so that the kernels are loaded and its life is the stage alone. After each kill of
`write`, whatever a reader would take for whole must be: the shards of every group with a manifest, and everything where
there is metadata.json. The other stages are killed once each, or never where KILLS is 1. When the stages are done, the
bucket holds the bytes of a run on a disk.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import s3fs  # noqa: F401 - loaded here once, not by every fork

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.config.pipeline import PipelineSettings, pipeline_from_mapping
from gaudi_bert.runners.local import run_stages
from gaudi_bert.runners.stage_calls import RunRequest
from tests.builders import folders
from tests.builders.faulty_proxy import faulty_proxy
from tests.builders.kills import finish, killed_after
from tests.builders.reporters import QUIET
from tests.builders.s3_server import ENVIRONMENT, contents, quick, s3_server, upload

FAULTY_SHARE = 0.03
ENOUGH = 40


def pipeline(text: str, store: dict, prepare: dict | None = None, training: dict | None = None) -> PipelineSettings:
    """A small pipeline, from text to a report."""
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
    return pipeline_from_mapping(mapping, "a test")


def write_text_files(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(5):
        documents = [
            "\n".join(f"line {m} of text {n * number} has {'word ' * ((n * m + number) % 13 + 1)}." for m in range(9))
            for n in range(37)
        ]
        (folder / f"text-{number}.txt").write_text("\n\n".join(documents))


def check_readable(url: str, endpoint: str, wanted: dict[str, bytes]) -> None:
    """What a reader would take for whole is as it should be."""
    objects = Objects(quick(endpoint))
    found = contents(url, objects)
    for name, data in found.items():
        if name.startswith("group-"):
            if not name.endswith(".json"):
                continue
            assert found[f"{name[:-5]}.index"] == wanted[f"{name[:-5]}.index"], f"no index, and {name} is there"
            for shard in json.loads(data)["shards"]:
                assert found[shard["name"]] == wanted[shard["name"]], f"{shard['name']}: not whole, and {name} is there"
    if "metadata.json" in found:
        assert {name: found[name] for name in wanted if name.startswith(("packed-", "group-", "metadata"))} == {
            name: wanted[name] for name in wanted if name.startswith(("packed-", "group-", "metadata"))
        }


def main(folder: Path, kills: int, stages: list[str], seed: int) -> None:
    rng = random.Random(seed)
    os.environ.update(ENVIRONMENT)
    write_text_files(folder / "text")
    local = RunRequest(pipeline(str(folder / "text"), {}), folder / "disk", folder, QUIET, workers=1)
    data = [stage for stage in stages if stage not in ("train", "evaluate", "report")]
    run_stages(local, data)  # loads the kernels, and starts no thread
    finish(lambda: run_stages(local, stages))
    root = folder / "disk" / "small"
    wanted = folders.contents(root)
    packed = {name.removeprefix("packed/train/"): wanted[name] for name in wanted if name.startswith("packed/train/")}
    killed = 0
    with s3_server() as server, faulty_proxy(server.port, seed) as proxy:
        finish(lambda: server.make_bucket("bucket"))
        finish(lambda: upload(folder / "text", "s3://bucket/text", Objects(quick(server.endpoint))))
        proxy.share = FAULTY_SHARE
        store = {**quick(proxy.endpoint, cache_bytes=2_000_000).model_dump(), "scratch": str(folder / "scratch")}
        settings = pipeline("s3://bucket/text", store)

        def attempt(work: str, stage: str) -> Callable[[], None]:
            run = RunRequest(settings, Path(f"s3://bucket/{work}"), folder, QUIET, workers=2)
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
            made = contents("s3://bucket/killed/small", Objects(quick(server.endpoint)))
            ours, theirs = folders.comparable(made), folders.comparable(wanted)
            assert ours == theirs, sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))

        finish(compare)
        faults = ", ".join(f"{count} {fault}" for fault, count in sorted(proxy.happened.items()))
    left = list((folder / "scratch").iterdir())
    assert len(left) <= 1, f"scratch of killed processes is left: {left}"
    print(f"{killed} killed; faults of the server: {faults}; the same {len(folders.comparable(wanted))} files as on a disk")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]))
