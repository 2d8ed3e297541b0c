"""Stage train on tiny data: resumed runs end with the same bits, wherever and from whatever they go on."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml

from gaudi_bert.artefacts.results import to_json
from gaudi_bert.common.errors import FailedError, InputError, StoppedError
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config.pipeline import PipelineSettings, section_from_mapping
from gaudi_bert.rows.tokenizer import open_tokenizer
from gaudi_bert.runs.records import _compute_speedup, train
from gaudi_bert.training.checkpoint import find_checkpoint, read_checkpoint, read_newest_settings
from tests.builders import training_data as data
from tests.builders.agree import agree, identical
from tests.builders.json_lines import lines_of
from tests.builders.machines import make_read_only, small_disk
from tests.builders.reporters import QUIET, Listener, StopAfter
from tests.training.conftest import settings

LAST = "update-00000020.safetensors"


def checkpoint_digests(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((out / "checkpoints").iterdir())}


def test_what_a_run_leaves(whole_run) -> None:
    assert {path.name for path in whole_run.iterdir() if not path.name.startswith(".")} == {
        *("checkpoints", "engine.log", "metrics.jsonl", "settings.json", "settings.yaml"),
        *("tensorboard", "tokenizer_config.json", "training.json", "vocab.txt"),
    }
    for path in (whole_run, find_checkpoint(whole_run)):  # what `finetune --model` is given
        tokenizer = open_tokenizer(path)
        assert tokenizer.vocabulary_size == data.VOCABULARY
        # The text is not lower-cased.
        assert [tokenizer.tokenizer.encode(word).ids for word in ("word7", "Word7")] == [[2, 12, 3], [2, 1, 3]]
    assert list(checkpoint_digests(whole_run)) == ["update-00000015.safetensors", "update-00000020.safetensors"]
    lines = lines_of(whole_run / "metrics.jsonl")
    assert [line["update"] for line in lines if line["kind"] == "train"] == [4, 5, 8, 10, 12, 15, 16, 20]
    assert [line["update"] for line in lines if line["kind"] == "evaluation"] == [10, 20]
    assert lines[0].keys() >= {
        *("masked_lm_loss", "masked_lm_accuracy", "next_sentence_loss", "next_sentence_accuracy", "loss"),
        *("learning_rate", "sequences", "tokens", "sequences_per_second", "tokens_per_second"),
    }
    assert yaml.safe_load((whole_run / "settings.yaml").read_text())["training"]["updates"] == 20
    summary = json.loads((whole_run / "training.json").read_text())
    assert summary["updates"] == 20
    assert summary["evaluation"]["unigram_baseline"] > 0


def evaluations_of(out: Path) -> list[dict]:
    return [line for line in lines_of(out / "metrics.jsonl") if line["kind"] == "evaluation"]


def test_a_run_that_was_stopped_twice_and_damaged_ends_with_the_same_bits(packed, held_out, whole_run, tmp_path) -> None:
    """The first stop is where an evaluation is due; of the checkpoint that the second leaves, a bit flips."""
    out = tmp_path / "train"
    with pytest.raises(StoppedError, match="after update 10 of 20; run the same command again to resume"):
        train(settings(log_every_updates=1), packed, held_out, out, reporter=StopAfter(9))
    assert evaluations_of(out) == []
    with pytest.raises(StoppedError):
        train(settings(), packed, held_out, out, reporter=StopAfter(16))
    assert evaluations_of(out) == evaluations_of(whole_run)[:1]
    newest = sorted((out / "checkpoints").iterdir())[-1]
    assert newest.name in ("update-00000016.safetensors", "update-00000017.safetensors")
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    listener = Listener()
    train(settings(), packed, held_out, out, reporter=listener, resume=True)
    assert f"warning: {newest}: the file is not a complete checkpoint" in listener.text
    assert "train: resuming after update 15" in listener.text
    assert checkpoint_digests(out)[LAST] == checkpoint_digests(whole_run)[LAST]
    assert evaluations_of(out) == evaluations_of(whole_run)
    updates = [line["update"] for line in lines_of(out / "metrics.jsonl") if line["kind"] == "train"]
    assert updates == sorted(set(updates))


@pytest.mark.slow
def test_more_updates_may_be_asked_for_of_a_finished_and_of_a_stopped_run(packed, tmp_path) -> None:
    """During the warm-up the rate does not depend on the number of updates, so the bits must be those of one long run.

    That one measures the speed-up that packing brings, which changes no bit either.
    """
    listener, out, measured = Listener(), tmp_path / "short", tmp_path / "long"

    def run(updates: int, reporter: Reporter = listener, **options: bool) -> None:
        train(settings(warmup_updates=12, updates=updates), packed, None, out, reporter=reporter, **options)

    run(6)
    with pytest.raises(StoppedError):
        run(10, StopAfter(8), resume=True)
    with pytest.raises(InputError, match=r"training.updates = 10; pass --resume to extend it to 15"):
        run(15)
    run(15, resume=True)
    assert "training.updates was raised from 10 to 15; the optimizer keeps its moments" in listener.text
    with pytest.raises(InputError, match=r"training.updates: 15 in the file, 10 now"):
        run(10, resume=True)
    long_run = settings(warmup_updates=12, updates=15, measure_speedup=True)
    summary = train(long_run, packed, None, measured, reporter=listener)
    assert summary.content.realized_speedup is None or summary.content.realized_speedup > 0
    assert to_json(summary) == json.loads((measured / "training.json").read_text())
    assert "train: the realized speed-up " in listener.text
    ends = [read_checkpoint(find_checkpoint(folder)) for folder in (out, measured)]
    identical(ends[0].variables, ends[1].variables)
    identical(ends[0].second_moments, ends[1].second_moments)


def test_a_finished_run_is_left_alone(packed, held_out, whole_run) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*") if not path.name.startswith(".")}
    listener = Listener()
    for resume in (False, True):
        assert train(settings(), packed, held_out, whole_run, reporter=listener, resume=resume).skipped
    assert listener.text.count("nothing to do") == 2
    with pytest.raises(InputError, match=r"training.learning_rate: 0.001 in the file, 0.5 now"):
        train(settings(learning_rate=0.5), packed, held_out, whole_run, reporter=listener, resume=True)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_overwrite_starts_anew_and_the_decay_is_counted_from_where_the_setting_says(packed, whole_run, tmp_path) -> None:
    """The third of three updates, two of them warm-up, at a third of the peak; usually it would be half."""
    out = Path(shutil.copytree(whole_run, tmp_path / "train"))
    short = settings(updates=3, warmup_updates=2, log_every_updates=1, decay_from="start")
    assert train(short, packed, None, out, reporter=QUIET, overwrite=True).content.updates == 3
    assert not train(short, packed, None, out, reporter=QUIET, overwrite=True).skipped
    assert list(checkpoint_digests(out)) == ["update-00000003.safetensors"]
    agree([line["learning_rate"] for line in lines_of(out / "metrics.jsonl")], [5e-4, 1e-3, 1e-3 / 3])
    kept = [json.loads((folder / "settings.json").read_text())["settings"]["training"] for folder in (out, whole_run)]
    assert [each.get("decay_from") for each in kept] == ["start", "warmup"]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_good(packed, tmp_path) -> None:
    out = tmp_path / "train"
    wild = settings(learning_rate=1e30, warmup_updates=12, clip_norm=0.0, save_every_updates=1, log_every_updates=1)
    with pytest.raises(FailedError, match=r"update \d+: the (loss|gradient) is not finite .*lower training.learning_rate"):
        train(wild, packed, None, out, reporter=QUIET)
    assert not (out / "training.json").exists()
    assert all(line["loss"] < float("inf") for line in lines_of(out / "metrics.jsonl"))


def test_a_finished_run_on_a_read_only_file_system_is_nothing_to_do(packed, held_out, whole_run, tmp_path) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        shutil.copytree(whole_run, disk / "run")
        make_read_only(disk)
        assert train(settings(), packed, held_out, disk / "run", reporter=QUIET).skipped


def test_a_dry_run_prints_the_plan_for_the_processes_of_the_settings_and_writes_nothing(packed, held_out, tmp_path) -> None:
    listener = Listener()
    values = {"model": data.MODEL, "training": {"micro_batch_packs": 2, "global_batch_sequences": 16}}
    run = section_from_mapping(PipelineSettings, {**values, "resources": {"workers": 2}}, "test")
    plan = to_json(train(run, packed, held_out, tmp_path / "train", reporter=listener, dry_run=True))
    assert [plan[key] for key in ("dry_run", "accumulation_steps", "workers")] == [True, 2, 2]
    agree(plan["sequences_per_update"], 8 * plan["packing_factor"])
    assert "2 x 2 packs" in listener.text
    assert list(tmp_path.iterdir()) == []


def test_the_target_ends_the_run_at_an_evaluation(packed, held_out, tmp_path) -> None:
    with pytest.raises(InputError, match="target_masked_lm_accuracy: the setting requires evaluation data"):
        train(settings(target_masked_lm_accuracy=0.001), packed, None, tmp_path / "one", reporter=QUIET)
    easy = settings(target_masked_lm_accuracy=0.001, evaluate_every_updates=6)
    listener = Listener()
    summary = train(easy, packed, held_out, tmp_path / "two", reporter=listener)
    assert (summary.content.updates, summary.content.reached_target) == (6, True)
    assert "target_masked_lm_accuracy = 0.001 is reached, so the run ends" in listener.text
    assert train(easy, packed, held_out, tmp_path / "two", reporter=listener, resume=True).skipped


@pytest.mark.slow
def test_training_on_unpacked_records_and_from_weights(packed, whole_run, tmp_path) -> None:
    unpacked = data.write_unpacked(tmp_path / "examples" / "train", data.make_packs(29))
    start = settings(updates=2, init_checkpoint=str(whole_run), loss="sequence", optimizer="lamb")
    listener = Listener()
    with pytest.raises(InputError, match="the weights belong to another model: vocab_size is 61 there, but 30522 here"):
        train(start, unpacked, packed, tmp_path / "one", reporter=listener)
    (tmp_path / "examples" / "vocab.txt").write_text("word\n" * data.VOCABULARY)
    summary = train(start, unpacked, packed, tmp_path / "two", reporter=listener)
    assert "starting from the weights" in listener.text
    assert (summary.content.packing_factor, summary.content.sequences) == (1.0, 2 * 16)


# --- with a stand-in for Gaudi's package: taking up runs elsewhere


def on_device(device: str, updates: int = 3) -> PipelineSettings:
    return settings(device=device, updates=updates, warmup_updates=0, log_every_updates=1)


@pytest.mark.slow
def test_a_run_that_goes_from_a_cpu_to_gaudi_and_back(packed, tmp_path, monkeypatch) -> None:
    """What changes on Gaudi is said; what began there, or went through it, stays plain on a CPU."""
    monkeypatch.setenv("TF_HCCL_MEMORY_ALLOWANCE_MB", "1536")
    pytest.importorskip("tensorflow")
    from tests.engines.tensorflow.test_engine import stand_in

    calls = stand_in(monkeypatch)
    out, listener = tmp_path / "run", Listener()

    def is_compiled() -> bool:
        return read_newest_settings(out / "checkpoints")["compiled_kernels"]

    with pytest.raises(StoppedError):
        train(on_device("cpu"), packed, None, out, reporter=StopAfter(1))
    assert (is_compiled(), calls) == (True, [])
    train(on_device("hpu"), packed, None, out, reporter=listener, resume=True)
    assert (is_compiled(), calls[0]) == (False, "load_habana_module")
    assert (
        "note: the run began with compiled kernels, which this device does not support, so dropout masks differ from now on"
        in listener.text
    )
    train(on_device("cpu", 4), packed, None, out, reporter=QUIET, resume=True)
    assert is_compiled() is False


# --- the realized speed-up: the median of pairs, not the ratio of medians; and nothing where more was measured than there is


@pytest.mark.parametrize(
    ("factor", "packed", "unpacked", "realized"),
    [
        # The machine slowed down in the middle: each pair saw one speed.
        (2.0, (1.0, 1.0, 5.0, 5.0, 5.0), (0.9, 0.9, 4.5, 4.5, 4.5), 1.8),
        (2.03, (1.0,) * 5, (1.04,) * 5, 2.03 * 1.04),  # a little above the limit is noise
        (2.03, (1.0,) * 5, (1.06,) * 5, None),
    ],
)
def test_the_realized_speedup(factor: float, packed, unpacked, realized: float | None) -> None:
    speedup, _ = _compute_speedup(factor, packed, unpacked)
    assert speedup is None if realized is None else abs(speedup - realized) < 1e-9
