"""Pipelines from and to a bucket with --on docker, in real containers: the bytes of a run on a disk, and no secret left."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_bert.artefacts.store.objects import Objects
from tests.builders import folders
from tests.builders.agree import identical
from tests.builders.folders import comparable
from tests.builders.real_containers import Docker
from tests.builders.s3_server import ENVIRONMENT, S3Server, contents, quick, s3_server, upload

GaudiBert = Callable[..., subprocess.CompletedProcess[str]]
SENTENCES = "The river runs under the stone. A quick delta sings. Green alpha is over beta.\nGamma is the river's stone.\n"
SECRET = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]
TINY = """
name: tiny
prepare: {text: TEXT, train_vocab: 131, max_sequence_length: 37, max_predictions: 7, duplicates: 2, shards: 3,
          evaluation_fraction: 0.2}
packing: {depth: 5, shard_multiple: 4}
model: {hidden_size: 10, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 14}
training: {device: cpu, global_batch_sequences: 12, micro_batch_packs: 2, updates: 6, warmup_updates: 2, threads: 1,
           save_every_updates: 3, evaluate_every_updates: 6, log_every_updates: 1, measure_speedup: false}
"""


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory, docker: Docker, gaudi_bert: GaudiBert) -> Path:
    """A folder with the text, and what the pipeline makes of it without containers."""
    folder = tmp_path_factory.mktemp("disk")
    (folder / "text").mkdir()
    for number in range(11):
        (folder / "text" / f"{number}.txt").write_text(SENTENCES * (number % 3 + 2))
    (folder / "tiny.yaml").write_text(TINY.replace("TEXT", "text"))
    done = gaudi_bert(folder, "run", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    return folder


def losses(metrics: bytes) -> list[float]:
    lines = map(json.loads, metrics.decode().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_from_and_to_a_bucket_on_this_machines_loopback(
    on_disk: Path, s3: S3Server, docker: Docker, gaudi_bert: GaudiBert, tmp_path: Path
) -> None:
    objects = Objects(quick(s3.endpoint))
    upload(on_disk / "text", "s3://bucket/docker/text", objects)
    pipeline = TINY.replace("TEXT", "s3://bucket/docker/text")
    (tmp_path / "tiny.yaml").write_text(
        f'{pipeline}store: {{endpoint_url: "{s3.endpoint}", scratch: "{tmp_path / "scratch"}"}}\n'
    )
    done = gaudi_bert(tmp_path, "run", "tiny.yaml", "--on", "docker", "--work", "s3://bucket/docker/work", "--json")
    assert done.returncode == 0, done.stderr
    assert "on this machine's network, where the store is" in done.stderr
    assert list(json.loads(done.stdout)) == [
        *("prepare", "histogram", "plan", "write", "verify", "train", "evaluate", "report")
    ]
    made, wanted = contents("s3://bucket/docker/work/tiny", objects), folders.contents(on_disk / "work" / "tiny")
    others = ("settings.", "examples.json")
    assert comparable(made, *others) == comparable(wanted, *others)
    identical(losses(made["train/metrics.jsonl"]), losses(wanted["train/metrics.jsonl"]))
    assert {"report.html", "train/training.json"} <= made.keys()
    everything = b"".join(made.values()) + done.stdout.encode() + done.stderr.encode()
    assert SECRET.encode() not in everything
    assert list((tmp_path / "scratch").iterdir()) == [], "scratch is left"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch", "tiny.yaml"]
    assert docker("ps", "--all", "--quiet", "--filter", "label=gaudi-bert.work=s3://bucket/docker/work/tiny").stdout == ""


def test_two_training_containers_work_in_a_bucket(
    on_disk: Path, s3: S3Server, docker: Docker, gaudi_bert: GaudiBert, tmp_path: Path
) -> None:
    """The server listens on the bridge, so containers reach it from a network of their own."""
    # A daemon that has just made the bridge does not say its gateway, which is the first address of the subnet.
    subnet = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}").stdout.strip()
    gateway = str(next(ipaddress.ip_network(subnet, strict=False).hosts()))
    workers = ("--stages", "train", "--set", "resources.workers=2", "--set", "training.updates=4")
    with s3_server(gateway) as server:
        server.make_bucket("bucket")
        objects = Objects(quick(server.endpoint))
        upload(on_disk / "work" / "tiny" / "packed", "s3://bucket/work/tiny/packed", objects)
        (tmp_path / "tiny.yaml").write_text(f'{TINY}store: {{endpoint_url: "{server.endpoint}"}}\n')
        done = gaudi_bert(tmp_path, "run", "tiny.yaml", "--on", "docker", "--work", "s3://bucket/work", *workers)
        assert done.returncode == 0, done.stderr
        assert "(2 containers)" in done.stderr
        metrics = objects.read("s3://bucket/work/tiny/train/metrics.jsonl")
    local = gaudi_bert(on_disk, "run", "tiny.yaml", *workers, "--overwrite")
    assert local.returncode == 0, local.stderr
    identical(losses(metrics), losses((on_disk / "work" / "tiny" / "train" / "metrics.jsonl").read_bytes()))
    (tmp_path / "tiny.yaml").write_text(f'{TINY}store: {{endpoint_url: "{s3.endpoint}"}}\n')
    refused = gaudi_bert(tmp_path, "run", "tiny.yaml", "--on", "docker", "--work", "s3://bucket/work", *workers)
    assert refused.returncode == 2
    assert "name the server by another address of this machine" in refused.stderr.splitlines()[-1]


def test_a_bucket_that_is_not_there_is_one_line(s3: S3Server, docker: Docker, gaudi_bert: GaudiBert, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(f'{TINY}store: {{endpoint_url: "{s3.endpoint}"}}\n')
    wanted = ("--set", "prepare.text=s3://no-such-bucket/text", "--stages", "prepare")
    done = gaudi_bert(tmp_path, "run", "tiny.yaml", "--on", "docker", "--work", "s3://no-such-bucket/work", *wanted)
    assert done.returncode == 2, done.stderr
    assert "s3://no-such-bucket/" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
