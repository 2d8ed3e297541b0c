"""The commands that the manifests hold, run for real: pods of each step side by side, waiting in their init containers.

All Jobs start at once, as after `kubectl apply -k`, in a bucket, and in the end its bytes are those of a local run on a
disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.kustomize import Manifest
from gaudi_bert.runners.kubernetes.manifests import pod_specs, render
from tests.builders import folders
from tests.builders.command_line import run_command
from tests.builders.s3_server import S3Server, contents, quick

PODS = 2
DATA_STEPS = ("prepare", "histogram", "plan", "write", "write-finish", "verify")
TEXT = "\n\n".join(
    "\n".join(f"Sentence {line} of document {document} says {'word ' * (line * document % 23 + 1)}." for line in range(30))
    for document in range(60)
)


def run_pod(item: Manifest, index: int, pipeline: Path) -> subprocess.CompletedProcess[str]:
    """The containers of a pod, one after the other, with the pipeline file where it is."""
    spec = next(pod_specs(item))
    done: Any = None
    for container in (*spec["initContainers"], *spec["containers"]):
        words = [str(word).replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"][1:]]
        words = [str(pipeline) if word == "/etc/gaudi-bert/pipeline.yaml" else word for word in words]
        command = [sys.executable, "-m", "gaudi_bert", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            break
    return done


@pytest.mark.slow
def test_the_pods_of_all_steps_together_make_what_one_process_makes(s3: S3Server, tmp_path: Path) -> None:
    objects = Objects(quick(s3.endpoint))
    objects.write("s3://bucket/corpus/text.txt", TEXT.encode())
    (tmp_path / "text.txt").write_text(TEXT)
    values = {
        "name": "tiny",
        "prepare": {"text": "s3://bucket/corpus/text.txt", "train_vocab": 200, "duplicates": 2, "shards": 3},
        "packing": {"shard_multiple": 4, "group_sequences": 200},
        "kubernetes": {"store": "s3://bucket/prefix"},
        "resources": {"data_workers": PODS},
        "store": {"endpoint_url": s3.endpoint},
    }
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(yaml.safe_dump(values))
    steps = render(load_pipeline(pipeline)).steps
    jobs = [(steps[step], index) for step in DATA_STEPS for index in range(steps[step]["spec"].get("completions", 1))]
    with ThreadPoolExecutor(len(jobs)) as pool:
        ended = list(pool.map(lambda job: run_pod(*job, pipeline), jobs))
    assert [
        (item["metadata"]["name"], done.stderr) for (item, _), done in zip(jobs, ended, strict=True) if done.returncode
    ] == []
    local = ["run", pipeline, "--work", tmp_path / "work", "--set", f"prepare.text={tmp_path / 'text.txt'}"]
    done = run_command(*local, "--stages", "prepare,histogram,plan,write,verify")
    assert done.returncode == 0, done.stderr
    made, wanted = contents("s3://bucket/prefix/tiny", objects), folders.contents(tmp_path / "work" / "tiny")
    # Pods count parts of the histogram.
    for found in (made, wanted):
        for name in [name for name in found if name.startswith(("histogram", ".")) or "/." in name]:
            del found[name]
    assert made == wanted
    assert len(made) > 20
