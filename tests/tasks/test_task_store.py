"""Rows, models and answers in a bucket: what comes out is what comes out here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.object_store import ObjectStore
from gaudi_bert.common.errors import InputError
from gaudi_bert.tasks.predict import predict
from gaudi_bert.tasks.prediction_files import PredictOptions
from tests.builders.reporters import QUIET
from tests.builders.s3_server import S3Server, contents, quick, upload
from tests.tasks.conftest import run

URL = "s3://bucket/tasks"
ROWS, HELD_OUT = "classification.jsonl", "classification-evaluation.jsonl"


@pytest.fixture(scope="module")
def folder(model, files, finished, tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Path:
    """A model and rows, here and in the bucket, and a model that was fine-tuned here."""
    made = tmp_path_factory.mktemp("tasks")
    shutil.copytree(model, made / "bert")
    for path in files["classification"]:
        shutil.copyfile(path, made / path.name)
    shutil.copytree(finished("classification").out, made / "tuned", ignore=shutil.ignore_patterns("checkpoints", ".*"))
    upload(made, URL, ObjectStore(quick(s3.endpoint)))
    return made


def tune(data: Any, evaluation: Any, model: Any, out: Any, **options: Any) -> Any:
    return run("classification", Path(data), Path(evaluation), Path(model), Path(out), **options)


@pytest.mark.slow
def test_fine_tuning_from_a_bucket(folder: Path, s3: S3Server, tmp_path: Path) -> None:
    store = {**quick(s3.endpoint).model_dump(), "scratch": str(tmp_path / "scratch")}
    tune(f"{URL}/{ROWS}", f"{URL}/{HELD_OUT}", f"{URL}/bert", tmp_path / "out", store=store)
    for name in ("config.json", "model.safetensors", "predictions.jsonl", "settings.json", "metrics.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / "tuned" / name).read_bytes(), name
    assert list((tmp_path / "scratch").iterdir()) == [], "scratch is left"
    with pytest.raises(
        InputError,
        match=r"--out s3://bucket/tasks/out: fine-tuning does not support URLs of an object store",
    ):
        tune(folder / ROWS, folder / HELD_OUT, folder / "bert", f"{URL}/out")
    labels = {"labels": f"{URL}/labels.txt"}
    with pytest.raises(
        InputError, match=r"task.labels s3://bucket/tasks/labels.txt: fine-tuning does not support URLs of an object store"
    ):
        tune(folder / ROWS, folder / HELD_OUT, folder / "bert", tmp_path / "other", task_settings=labels)
    with pytest.raises(InputError, match=r"s3://bucket/tasks/none.jsonl: the bucket does not exist or"):
        tune(f"{URL}/none.jsonl", folder / HELD_OUT, folder / "bert", tmp_path / "other", store=store)


def test_predictions_from_and_to_a_bucket(folder: Path, s3: S3Server, tmp_path: Path) -> None:
    objects, options = ObjectStore(quick(s3.endpoint)), PredictOptions()
    predict(folder / "tuned", str(folder / HELD_OUT), str(tmp_path / "here.jsonl"), options, {}, reporter=QUIET)
    there = (Path(f"{URL}/tuned"), f"{URL}/{HELD_OUT}", f"{URL}/answers/there.jsonl", options, {})
    common = {"reporter": QUIET, "store": objects.settings}
    assert predict(*there, **common).rows == 19
    found = contents(f"{URL}/answers", objects)
    assert found.keys() == {"there.jsonl", "there.jsonl.settings.json"}
    assert found["there.jsonl"] == (tmp_path / "here.jsonl").read_bytes()
    assert predict(*there, **common).skipped
    with pytest.raises(
        InputError, match=r"s3://bucket/tasks/answers/there.jsonl: the output was written with other settings"
    ):
        predict(*there[:3], PredictOptions(max_sequence_length=31), {}, **common)
    with pytest.raises(InputError, match=r"s3://bucket/tasks/classification-evaluation.jsonl: the URL is also the input"):
        predict(*there[:2], there[1], options, {}, **common)
