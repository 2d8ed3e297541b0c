"""Stage train on tiny data: resumed runs end with the same bits; what must not be overwritten is not."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from gaudi_bert.artefacts.training import read_training
from gaudi_bert.cli.results import to_json
from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import PipelineSettings, pipeline_from_mapping
from gaudi_bert.stages.training.train import train
from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint
from tests.builders import training_data as data
from tests.builders.small_disk import make_read_only, small_disk
from tests.builders.stop_after import StopAfter

MODEL = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
TRAINING = {
    "updates": 20,
    "warmup_updates": 4,
    "global_batch_sequences": 16,
    "micro_batch_packs": 8,
    "save_every_updates": 5,
    "evaluate_every_updates": 10,
    "log_every_updates": 4,
    "keep_checkpoints": 2,
    "shuffle_packs": 6,
}


def settings(**training) -> PipelineSettings:
    return pipeline_from_mapping({"model": MODEL, "training": {**TRAINING, **training}}, "test")


class Listener(Reporter):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())

    @property
    def text(self) -> str:
        return self.stream.getvalue()


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return data.write_packed(tmp_path_factory.mktemp("data") / "train", data.make_packs(29))


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    return data.write_packed(tmp_path_factory.mktemp("data") / "evaluation", data.make_packs(9, seed=8))


@pytest.fixture(scope="module")
def whole_run(packed, held_out, tmp_path_factory) -> Path:
    """Twenty updates without a stop."""
    out = tmp_path_factory.mktemp("run") / "train"
    train(settings(), packed, held_out, out, reporter=Reporter(quiet=True))
    return out


def checkpoint_digests(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((out / "checkpoints").iterdir())}


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_what_a_run_leaves(whole_run) -> None:
    assert sorted(path.name for path in whole_run.iterdir() if not path.name.startswith(".")) == [
        "checkpoints",
        "metrics.jsonl",
        "settings.json",
        "settings.yaml",
        "tensorboard",
        "tensorflow.log",
        "training.json",
    ]
    assert list(checkpoint_digests(whole_run)) == ["update-00000015.safetensors", "update-00000020.safetensors"]
    lines = lines_of(whole_run)
    assert [line["update"] for line in lines if line["kind"] == "train"] == [4, 5, 8, 10, 12, 15, 16, 20]
    assert [line["update"] for line in lines if line["kind"] == "evaluation"] == [10, 20]
    expected = {"masked_lm_loss", "masked_lm_accuracy", "next_sentence_loss", "next_sentence_accuracy", "loss"}
    expected |= {"learning_rate", "sequences", "tokens", "sequences_per_second", "tokens_per_second"}
    assert expected <= lines[0].keys()
    assert yaml.safe_load((whole_run / "settings.yaml").read_text())["training"]["updates"] == 20
    summary = json.loads((whole_run / "training.json").read_text())
    assert summary["updates"] == 20
    assert summary["evaluation"]["unigram_baseline"] > 0


@pytest.mark.parametrize("stop", [8, 10])
def test_a_stopped_and_resumed_run_ends_with_the_same_bits(packed, held_out, whole_run, tmp_path, stop) -> None:
    out = tmp_path / "train"
    with pytest.raises(StoppedError, match="the same command goes on"):
        train(settings(), packed, held_out, out, reporter=StopAfter(stop))
    stopped = checkpoint_digests(out)
    assert sorted(stopped)[-1] in (f"update-{stop:08d}.safetensors", f"update-{stop + 1:08d}.safetensors")
    train(settings(), packed, held_out, out, reporter=Reporter(quiet=True))
    last = "update-00000020.safetensors"
    assert checkpoint_digests(out)[last] == checkpoint_digests(whole_run)[last]
    evaluations = [[line for line in lines_of(run) if line["kind"] == "evaluation"] for run in (out, whole_run)]
    assert evaluations[0] == evaluations[1]


def test_an_evaluation_that_was_due_at_the_stop_is_made_when_the_run_goes_on(packed, held_out, whole_run, tmp_path) -> None:
    out = tmp_path / "train"
    with pytest.raises(StoppedError, match="after update 10 of 20"):
        train(settings(log_every_updates=1), packed, held_out, out, reporter=StopAfter(9))
    assert not any(line["kind"] == "evaluation" for line in lines_of(out))
    train(settings(), packed, held_out, out, reporter=Reporter(quiet=True))
    evaluations = [[line for line in lines_of(run) if line["kind"] == "evaluation"] for run in (out, whole_run)]
    assert [line["update"] for line in evaluations[0]] == [10, 20]
    assert evaluations[0] == evaluations[1]


def test_a_run_killed_before_its_last_word_says_it_when_it_goes_on(packed, held_out, whole_run, tmp_path) -> None:
    out = tmp_path / "train"
    shutil.copytree(whole_run, out)
    (out / "training.json").unlink()
    summary = train(settings(), packed, held_out, out, reporter=Reporter(quiet=True))
    assert summary.training.evaluation == read_training(whole_run / "training.json").evaluation
    assert lines_of(out) == lines_of(whole_run)


LONG = {"warmup_updates": 12, "micro_batch_packs": 4}


@pytest.fixture(scope="module")
def long_run(packed, held_out, tmp_path_factory) -> Path:
    """Fifteen updates without a stop, of which twelve are warm-up, of two micro-batches each."""
    out = tmp_path_factory.mktemp("run") / "long"
    train(settings(**LONG, updates=15), packed, held_out, out, reporter=Reporter(quiet=True))
    return out


@pytest.mark.parametrize("finished", [True, False])
def test_more_updates_may_be_asked_for_when_a_run_is_taken_up(packed, held_out, long_run, tmp_path, finished: bool) -> None:
    """During the warm-up the rate does not depend on the number of updates, so the bits must be those of the long run."""
    asked_for, short_run = settings(**LONG, updates=15), settings(**LONG, updates=10)
    out = tmp_path / "short"
    if finished:
        train(short_run, packed, held_out, out, reporter=Reporter(quiet=True))
    else:
        with pytest.raises(StoppedError):
            train(short_run, packed, held_out, out, reporter=StopAfter(5))
    with pytest.raises(InputError, match=r"training.updates = 10; pass --resume to go on to 15"):
        train(asked_for, packed, held_out, out, reporter=Reporter(quiet=True))
    listener = Listener()
    train(asked_for, packed, held_out, out, reporter=listener, resume=True)
    assert "training.updates = 10 is raised to 15: the moments are kept" in listener.text
    last = "update-00000015.safetensors"
    ends = [read_checkpoint(folder / "checkpoints" / last) for folder in (out, long_run)]
    for name, value in ends[1].second_moments.items():
        assert (ends[0].second_moments[name] == value).all()
        assert (ends[0].variables[name] == ends[1].variables[name]).all()
    with pytest.raises(InputError, match=r"made with another settings.training.updates: 15 there, 10 asked for"):
        train(short_run, packed, held_out, out, reporter=Reporter(quiet=True), resume=True)


def test_after_a_damaged_checkpoint_the_one_before_is_used(packed, held_out, whole_run, tmp_path) -> None:
    out = tmp_path / "train"
    with pytest.raises(StoppedError):
        train(settings(), packed, held_out, out, reporter=StopAfter(16))
    newest = sorted((out / "checkpoints").iterdir())[-1]
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    listener = Listener()
    train(settings(), packed, held_out, out, reporter=listener, resume=True)
    assert f"warning: {newest}: not a whole checkpoint" in listener.text
    assert "goes on after update 15" in listener.text
    last = "update-00000020.safetensors"
    assert checkpoint_digests(out)[last] == checkpoint_digests(whole_run)[last]
    updates = [line["update"] for line in lines_of(out) if line["kind"] == "train"]
    assert updates == sorted(set(updates))


def test_a_finished_run_is_left_alone(packed, held_out, whole_run) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*") if not path.name.startswith(".")}
    listener = Listener()
    for resume in (False, True):
        assert train(settings(), packed, held_out, whole_run, reporter=listener, resume=resume).skipped
    assert listener.text.count("nothing to do") == 2
    with pytest.raises(InputError, match=r"made with another settings.training.learning_rate: 0.001 there, 0.5 asked for"):
        train(settings(learning_rate=0.5), packed, held_out, whole_run, reporter=listener, resume=True)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_overwrite_starts_anew(packed, tmp_path) -> None:
    out = tmp_path / "train"
    with pytest.raises(StoppedError):
        train(settings(), packed, None, out, reporter=StopAfter(5))
    first = train(settings(updates=3), packed, None, out, reporter=Reporter(quiet=True), overwrite=True)
    assert first.training.updates == 3
    again = train(settings(updates=3), packed, None, out, reporter=Reporter(quiet=True), overwrite=True)
    assert not again.skipped
    assert list(checkpoint_digests(out)) == ["update-00000003.safetensors"]
    with pytest.raises(InputError, match="--resume and --overwrite exclude each other"):
        train(settings(), packed, None, out, reporter=Reporter(quiet=True), overwrite=True, resume=True)


def test_the_decay_is_counted_from_where_the_setting_says(packed, tmp_path) -> None:
    """The third of three updates, two of them warm-up: half of the peak, or a third. The first two are the same."""
    steps = {}
    for decay_from in ("warmup", "start"):
        out = tmp_path / decay_from
        run = settings(updates=3, warmup_updates=2, save_every_updates=1, keep_checkpoints=3, decay_from=decay_from)
        train(run, packed, None, out, reporter=Reporter(quiet=True))
        before, after = (read_checkpoint(file).variables for file in sorted((out / "checkpoints").iterdir())[1:3])
        steps[decay_from] = {name: after[name] - value for name, value in before.items()}
        kept = json.loads((tmp_path / f"{decay_from}/settings.json").read_text())["settings"]["training"]
        assert kept.get("decay_from") == (None if decay_from == "warmup" else "start")
    for name, step in steps["warmup"].items():
        np.testing.assert_allclose(steps["start"][name], step * 2 / 3, rtol=1e-3, atol=1e-7, err_msg=name)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_good(packed, tmp_path) -> None:
    out = tmp_path / "train"
    wild = settings(learning_rate=1e30, warmup_updates=12, clip_norm=0.0, save_every_updates=1, log_every_updates=1)
    with pytest.raises(FailedError, match=r"update \d+: the (loss|gradient) is not finite .*lower training.learning_rate"):
        train(wild, packed, None, out, reporter=Reporter(quiet=True))
    assert not (out / "training.json").exists()
    for line in lines_of(out):
        assert line["loss"] < float("inf")


def test_a_finished_run_on_a_read_only_file_system_is_nothing_to_do(packed, held_out, whole_run, tmp_path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        shutil.copytree(whole_run, disk / "run")
        make_read_only(disk)
        assert train(settings(), packed, held_out, disk / "run", reporter=Reporter(quiet=True)).skipped


def test_a_dry_run_prints_the_plan_and_writes_nothing(packed, held_out, tmp_path) -> None:
    listener = Listener()
    run = settings(micro_batch_packs=4)
    plan = to_json(train(run, packed, held_out, tmp_path / "train", reporter=listener, dry_run=True))
    assert plan["dry_run"] is True
    assert plan["accumulation_steps"] == 2
    assert plan["sequences_per_update"] == pytest.approx(8 * plan["packing_factor"])
    assert "2 x 4 packs" in listener.text
    assert list(tmp_path.iterdir()) == []


def test_the_realized_speedup_is_measured_and_changes_no_bit(packed, held_out, whole_run, tmp_path) -> None:
    listener = Listener()
    out = tmp_path / "train"
    summary = train(settings(measure_speedup=True), packed, held_out, out, reporter=listener)
    assert summary.training.realized_speedup > 0
    assert to_json(summary) == json.loads((out / "training.json").read_text())
    assert "train: realized speed-up " in listener.text
    ends = [read_checkpoint(find_checkpoint(folder)).variables for folder in (out, whole_run)]
    assert all((value == ends[1][name]).all() for name, value in ends[0].items())


def test_the_target_ends_the_run_at_an_evaluation(packed, held_out, tmp_path) -> None:
    with pytest.raises(InputError, match="target_masked_lm_accuracy: there is no evaluation data"):
        train(settings(target_masked_lm_accuracy=0.001), packed, None, tmp_path / "one", reporter=Reporter(quiet=True))
    easy = settings(target_masked_lm_accuracy=0.001, evaluate_every_updates=6)
    listener = Listener()
    summary = train(easy, packed, held_out, tmp_path / "two", reporter=listener)
    assert (summary.training.updates, summary.training.reached_target) == (6, True)
    assert "target_masked_lm_accuracy = 0.001 is reached, the run ends" in listener.text
    assert train(easy, packed, held_out, tmp_path / "two", reporter=listener, resume=True).skipped


def test_training_on_unpacked_records_and_from_weights(packed, whole_run, tmp_path) -> None:
    unpacked = data.write_unpacked(tmp_path / "examples" / "train", data.make_packs(29))
    start = settings(updates=2, init_checkpoint=str(whole_run), loss="sequence", optimizer="lamb")
    listener = Listener()
    with pytest.raises(InputError, match="the weights are of another model: vocab_size is 61 there, 30522 here"):
        train(start, unpacked, packed, tmp_path / "one", reporter=listener)
    (tmp_path / "examples" / "vocab.txt").write_text("word\n" * data.VOCABULARY)
    summary = train(start, unpacked, packed, tmp_path / "two", reporter=listener)
    assert "starts from the weights" in listener.text
    assert summary.training.packing_factor == 1.0
    assert summary.training.sequences == 2 * 16
    assert "sequences repeat" not in listener.text
    large = settings(global_batch_sequences=100, micro_batch_packs=10)
    train(large, unpacked, None, tmp_path / "three", reporter=listener, dry_run=True)
    count = sum(len(pack) for pack in data.make_packs(29))
    assert f"an update takes 100 packs and the data has {count}: sequences repeat within an update" in listener.text


def test_bad_data_leaves_nothing_that_looks_finished(tmp_path) -> None:
    folder = data.write_packed(tmp_path / "data", data.make_packs(29))
    shard = folder / "packed-00000-00002.tfrecord"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    out = tmp_path / "train"
    with pytest.raises(InputError, match=r"packed-00000-00002.tfrecord: record 0 "):
        train(settings(), folder, None, out, reporter=Reporter(quiet=True))
    assert not (out / "training.json").exists()
