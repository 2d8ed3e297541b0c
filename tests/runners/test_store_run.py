"""A whole pipeline from text in a bucket to a report in a bucket, through a bad server: the bytes of a run on a disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import InputError
from gaudi_bert.config.pipeline import PipelineSettings
from gaudi_bert.runners.local import missing_inputs, run_stages
from gaudi_bert.runners.stage_calls import RunRequest
from gaudi_bert.runners.stage_table import stages_of
from tests.builders import folders
from tests.builders.faulty_proxy import faulty_proxy
from tests.builders.folders import comparable
from tests.builders.kills import pipeline as small_pipeline
from tests.builders.reporters import QUIET
from tests.builders.s3_server import S3Server, contents, quick, upload

SIZES = {"max_sequence_length": 31, "max_predictions": 5, "shards": 3, "duplicates": 2, "evaluation_fraction": 0.2}
RHYTHM = {"updates": 6, "save_every_updates": 2, "log_every_updates": 2, "evaluate_every_updates": 100, "threads": None}
SENTENCE = "the packed row holds several short sequences and no token of one of them sees another token"
WORDS = SENTENCE.split()


def pipeline(text: str, store: dict[str, Any], **training: Any) -> PipelineSettings:
    return small_pipeline(text, store, SIZES, {**RHYTHM, **training})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "text"
    folder.mkdir()
    for number in range(3):
        documents = [
            "\n".join(" ".join(WORDS[(n * m + number) % 11 : (n * m + number) % 11 + 6]) + "." for m in range(2, 9))
            for n in range(29)
        ]
        (folder / f"book-{number}.txt").write_text("\n\n".join(documents) + "\n")
    return folder


@pytest.fixture(scope="module")
def on_disk(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the pipeline makes on a disk."""
    work = tmp_path_factory.mktemp("disk")
    settings = pipeline(str(text), {})
    run_stages(RunRequest(settings, work, work, QUIET, workers=1), stages_of(settings))
    return comparable(folders.contents(work / "small"), "examples.json")


@pytest.mark.slow
def test_from_and_to_a_bucket_through_a_bad_server(
    s3: S3Server, text: Path, on_disk: dict[str, bytes], tmp_path: Path
) -> None:
    objects = Objects(quick(s3.endpoint))
    upload(text, "s3://bucket/text", objects)
    with faulty_proxy(s3.port, seed=5) as proxy:
        proxy.share = 0.1
        store = {**quick(proxy.endpoint).model_dump(), "scratch": str(tmp_path)}
        settings = pipeline("s3://bucket/text", store)
        run = RunRequest(settings, Path("s3://bucket/work"), tmp_path, QUIET, workers=1)
        summaries = run_stages(run, stages_of(run.settings))
        assert sum(proxy.happened.values()) > 10
        again = run_stages(run, stages_of(run.settings))
        assert missing_inputs(run.folder, "report") == []
    assert list(summaries) == list(again) == stages_of(run.settings)
    assert again["train"].skipped
    made = contents("s3://bucket/work/small", objects)
    assert comparable(made, "examples.json") == on_disk
    assert {"report.html", "train/training.json", "train/metrics.jsonl"} <= made.keys()
    assert any(name.startswith("train/tensorboard/") for name in made)
    assert list(tmp_path.iterdir()) == [], "scratch is left"


@pytest.mark.slow
def test_training_goes_on_from_the_bucket(s3: S3Server, on_disk: dict[str, bytes], tmp_path: Path) -> None:
    """A run that lost its machine after the checkpoint of update 4: what is put is what goes on."""
    objects = Objects(quick(s3.endpoint))
    for name, content in contents("s3://bucket/work/small", objects).items():
        if not name.startswith("train/") or name.endswith(("00000004.safetensors", "settings.json", "metrics.jsonl")):
            objects.write(f"s3://bucket/resumed/small/{name}", content)
    settings = pipeline("s3://bucket/text", quick(s3.endpoint).model_dump())
    run_stages(RunRequest(settings, Path("s3://bucket/resumed"), tmp_path, QUIET), ["train", "evaluate"])
    made = contents("s3://bucket/resumed/small", objects)
    assert comparable(made, "examples.json") == on_disk
    lines = [json.loads(line) for line in made["train/metrics.jsonl"].decode().splitlines()]
    assert [line["update"] for line in lines if line["kind"] == "train"] == [2, 4, 6]


@pytest.mark.slow
def test_weights_and_data_in_a_bucket(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gaudi_bert.tasks.models.export import export
    from gaudi_bert.tfrecords.inspect import inspect
    from gaudi_bert.training.train import train
    from gaudi_bert.training.verify_model import verify_model

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    work, store = Path("s3://bucket/work/small"), quick(s3.endpoint)
    result = export(work / "train", Path("s3://bucket/exported"), kind="huggingface", reporter=QUIET)
    made = contents("s3://bucket/exported", Objects(store))
    assert sorted(made) == sorted(result.files) == ["config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"]
    settings = pipeline("s3://bucket/text", store.model_dump(), init_checkpoint="s3://bucket/exported", updates=1)
    train(settings, work / "packed" / "train", None, tmp_path / "second", reporter=QUIET)
    assert "s3://bucket/exported" in (tmp_path / "second" / "settings.yaml").read_text()
    assert verify_model(checkpoint=work / "train", data=work / "packed" / "train", reporter=QUIET).leaks == 0
    shard = next(
        name for name in contents("s3://bucket/work/small/packed/train", Objects(store)) if name.startswith("packed-")
    )
    assert inspect(work / "packed" / "train" / shard, vocabulary=work / "examples" / "vocab.txt").packed


@pytest.mark.slow
def test_a_run_folder_that_is_not_ours_is_refused(s3: S3Server, tmp_path: Path) -> None:
    from gaudi_bert.training.train import train

    objects = Objects(quick(s3.endpoint))
    objects.write("s3://bucket/elses/thesis.txt", b"mine")
    settings = pipeline("s3://bucket/text", objects.settings.model_dump())
    data, out = Path("s3://bucket/work/small/packed/train"), Path("s3://bucket/elses")
    with pytest.raises(InputError, match=r"s3://bucket/elses: exists, but settings.json does not describe it"):
        train(settings, data, None, out, reporter=QUIET)
    assert contents("s3://bucket/elses", objects) == {"thesis.txt": b"mine"}
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_shards_that_have_no_room_are_refused(s3: S3Server, tmp_path: Path) -> None:
    from gaudi_bert.training.train import train

    settings = pipeline("s3://bucket/text", quick(s3.endpoint, cache_bytes=999).model_dump())
    data = Path("s3://bucket/work/small/packed/train")
    with pytest.raises(InputError, match=r"small/packed/train: a process needs .* store.cache_bytes is 999; raise"):
        train(settings, data, None, tmp_path / "run", reporter=QUIET)


@pytest.mark.slow
def test_a_shard_that_vanished_is_named(s3: S3Server, tmp_path: Path) -> None:
    from gaudi_bert.training.train import train

    objects = Objects(quick(s3.endpoint))
    for name, content in contents("s3://bucket/work/small/packed/train", objects).items():
        if name != "packed-00000-00001.tfrecord":
            objects.write(f"s3://bucket/lacking/{name}", content)
    settings = pipeline("s3://bucket/text", objects.settings.model_dump())
    with pytest.raises(InputError, match=r"s3://bucket/lacking/packed-00000-00001.tfrecord: no such object"):
        train(settings, Path("s3://bucket/lacking"), None, tmp_path / "run", reporter=QUIET)


@pytest.mark.slow
def test_a_run_in_the_bucket_is_raised_and_started_anew(s3: S3Server) -> None:
    from gaudi_bert.training.train import train

    store = quick(s3.endpoint)
    data, out = Path("s3://bucket/work/small/packed/train"), Path("s3://bucket/raised")

    def run(updates: int, **options: bool) -> list[str]:
        settings = pipeline("s3://bucket/text", store.model_dump(), updates=updates, keep_checkpoints=2)
        train(settings, data, None, out, reporter=QUIET, **options)
        made = contents("s3://bucket/raised", Objects(store))
        assert "training.json" in made
        assert json.loads(made["settings.json"])["settings"]["training"]["updates"] == updates
        return [name[-13:-12] for name in made if name.startswith("checkpoints/")]

    assert run(2) == ["2"]
    assert run(6, resume=True) == ["4", "6"]
    assert run(2, overwrite=True) == ["2"]
