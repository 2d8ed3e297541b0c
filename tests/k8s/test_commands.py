"""The commands that the manifests hold, run for real: pods of each step side by side, waiting in their init containers.

All Jobs start at once, as after `kubectl apply -k`, and in the end the packed bytes are those of a local run.
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

from gaudi_bert.config.pipeline import load_pipeline
from gaudi_bert.runners.kubernetes.jobs import pod_specs
from gaudi_bert.runners.kubernetes.kustomize import Manifest
from gaudi_bert.runners.kubernetes.manifests import render
from tests.builders.folders import contents

PODS = 2
DATA_STEPS = ("prepare", "histogram", "plan", "write", "write-finish", "verify")
TEXT = "\n\n".join(
    "\n".join(f"Sentence {line} of document {document} says {'word ' * (line * document % 23 + 1)}." for line in range(30))
    for document in range(60)
)


def run_pod(item: Manifest, index: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """The containers of a pod, one after the other, with a pod's paths below `folder`."""
    spec = next(pod_specs(item))
    done: Any = None
    for container in (*spec["initContainers"], *spec["containers"]):
        words = [str(word).replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in container["command"]]
        places = {"gaudi-bert": None, "/etc/gaudi-bert/pipeline.yaml": folder / "pipeline.yaml", "/work": folder / "work"}
        command = [sys.executable, "-m", "gaudi_bert", *(str(places.get(word) or word) for word in words[1:])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            break
    return done


@pytest.mark.slow
def test_the_pods_of_all_steps_together_make_what_one_process_makes(tmp_path: Path) -> None:
    for name in ("cluster", "local"):
        folder = tmp_path / name
        folder.mkdir()
        pipeline = {
            "name": "tiny",
            "prepare": {"text": str(tmp_path / "text.txt"), "train_vocab": 200, "duplicates": 2, "shards": 3},
            "packing": {"shard_multiple": 4, "group_sequences": 200},
            "resources": {"data_workers": PODS},
        }
        (folder / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    (tmp_path / "text.txt").write_text(TEXT)
    settings = load_pipeline(tmp_path / "cluster" / "pipeline.yaml", ["prepare.text=python-docs"])
    steps = render(settings).steps
    jobs = [(steps[step], index) for step in DATA_STEPS for index in range(steps[step]["spec"].get("completions", 1))]
    with ThreadPoolExecutor(len(jobs)) as pool:
        ended = list(pool.map(lambda job: run_pod(*job, tmp_path / "cluster"), jobs))
    assert [
        (item["metadata"]["name"], done.stderr) for (item, _), done in zip(jobs, ended, strict=True) if done.returncode
    ] == []
    command = [sys.executable, "-m", "gaudi_bert", "run", str(tmp_path / "local" / "pipeline.yaml")]
    command += ["--work", str(tmp_path / "local" / "work"), "--stages", "prepare,histogram,plan,write,verify"]
    subprocess.run(command, check=True, capture_output=True)
    made = contents(tmp_path / "cluster/work/tiny/packed")
    assert made == contents(tmp_path / "local/work/tiny/packed")
    assert len(made) > 8
